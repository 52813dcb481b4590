"""Where a run goes on from: the checkpoint, whether it fits, and what is overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from isotype.core.errors import CheckpointError
from isotype.core.staging import recover
from isotype.report.narrow import wrapped
from isotype.report.run.record import JSON_NAME
from isotype.train.same_run import changed_length, differences
from isotype.train.saved import (
    RESULT_FILES,
    all_checkpoints,
    damage,
    whole_checkpoints,
)
from isotype.train.settings import Settings

_NO_RESUME = (None, False, "False", "false")


def resume_point(settings: Settings) -> Path | None:
    """The whole checkpoint that the run goes on from, or None for a start from the beginning."""
    asked = settings.training.resume_from_checkpoint
    if asked in _NO_RESUME:
        return None
    root = Path(settings.training.output_dir)
    with settings.training.main_process_first(desc="looking for checkpoints"):
        if settings.training.should_save:
            recover(root)
    whole = whole_checkpoints(root)
    if str(asked).lower() in ("true", "last", "latest"):
        return next((path for path in reversed(whole) if damage(path, contents=True) is None), None)
    path = Path(str(asked))
    reason = damage(path, contents=True)
    if reason is None:
        return path
    others = ", ".join(p.name for p in reversed(whole))
    raise CheckpointError.of(
        "no checkpoint to go on from",
        f"--resume_from_checkpoint {asked}: {reason}",
        "a folder checkpoint-N that was saved to the end",
        f"whole in {root}: {others}" if whole else f"there is none in {root}: leave the argument out",
    )


def check_resume(identity: Mapping[str, Any], resume: Path | None) -> None:
    """Whether the checkpoint to go on from was made by the run that `identity` describes.

    Raises:
        CheckpointError: it was not; every difference is named.
    """
    if resume is None:
        return
    found = differences(resume, identity)
    if found:
        raise CheckpointError(
            f"{resume} is of another run",
            found,
            hint="a checkpoint goes on with the settings it was made with; leave --resume_from_checkpoint out and "
            "give another --output_dir to start again",
        )


def say_what_is_overwritten(settings: Settings, console: Console) -> None:
    root = Path(settings.training.output_dir)
    held = [name for name in (*RESULT_FILES["lora"], *RESULT_FILES["full"]) for _ in root.glob(name)]
    if (root / JSON_NAME).is_file() and held:
        console.print(
            wrapped(
                f"note: {root} holds a finished run ({held[0]}, {JSON_NAME}); this run will overwrite it",
                console,
            ),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def say_where(settings: Settings, identity: Mapping[str, Any], resume: Path | None, console: Console) -> None:
    """Where the run starts, if it was asked to go on from a checkpoint, and which ones it could not take."""
    asked, root = settings.training.resume_from_checkpoint, settings.training.output_dir
    if asked in _NO_RESUME:
        return
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    newer = False
    for path in all_checkpoints(root):
        reason = damage(path, contents=newer or resume is None)
        newer = newer or path == resume
        if reason is not None:
            say(f"note: {path} is not whole: {reason}")
    if resume is None:
        say(f"no whole checkpoint in {root}: starting at step 0")
    else:
        say(f"going on from {resume}")
        changed = changed_length(resume, identity)
        if changed is not None:
            say(wrapped(f"note: {changed}", console))
