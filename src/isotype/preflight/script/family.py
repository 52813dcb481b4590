"""Communication of the processes of one `isotype run`, by empty files in a shared folder.

A training may run in this process, in one started by multiprocessing, or in many of a launcher: one of them
reports on the first step, and one explains a crash.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "ISOTYPE_RUN"
"""Environment variable with the folder, set in processes started by `isotype run`."""

Fact = Literal["speaks", "explained", "seen"]


@dataclass(frozen=True)
class Family:
    """The processes of one run: their folder, and the process id started by the user (`top`, None in the others)."""

    folder: Path
    top: int | None

    @property
    def is_top(self) -> bool:
        """True if this process was started by the user."""
        return self.top == os.getpid()

    def claim(self, fact: Fact) -> bool:
        """Return whether this process is the first to claim the fact."""
        try:
            (self.folder / fact).touch(exist_ok=False)
        except FileExistsError:
            return False
        except FileNotFoundError:
            return True  # the top process has ended: no other process is left
        return True

    def knows(self, fact: Fact) -> bool:
        """Return whether any process has claimed the fact."""
        return (self.folder / fact).exists()

    def leave(self) -> None:
        """Remove the folder if this is the top process."""
        if self.is_top:
            os.environ.pop(VARIABLE, None)
            shutil.rmtree(self.folder, ignore_errors=True)


def family() -> Family:
    """Return the family that started this process; else a new one with this process as its top."""
    known = os.environ.get(VARIABLE)
    if known is not None:
        return Family(Path(known), None)
    folder = Path(tempfile.mkdtemp(prefix="isotype-run-"))
    os.environ[VARIABLE] = str(folder)
    return Family(folder, os.getpid())


PREFLIGHT_SECONDS = 10.0
"""Seconds for the trace before the first step: enough for thousands of operators."""


@dataclass(frozen=True)
class Options:
    """Options of `isotype run`.

    Attributes:
        target: path of the script, or name of the module.
        module: whether `target` is a module (`-m`).
        arguments: of the script.
        steps: number of optimizer steps to watch.
        device: simulated profile; None for the model's device.
        seconds: time limit of tracing the first step before it runs; 0 disables it.
        watch: whether all steps are watched, and a non-finite loss ends the training.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    steps: int = 1
    device: str | None = None
    seconds: float = PREFLIGHT_SECONDS
    watch: bool = False

    def flags(self) -> Sequence[str]:
        """Return the arguments of `isotype run` for these options, without the target."""
        device = () if self.device is None else ("--device", self.device)
        watch = ("--watch",) if self.watch else ()
        return ("--steps", str(self.steps), *device, *watch, "--preflight-seconds", f"{self.seconds:g}")
