"""Processes of a distributed launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from isotype.core.errors import Problem, UsageError

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def check_surroundings() -> None:
    """Raise UsageError if the working directory is gone or a launcher's variables are invalid."""
    problems = list(_problems())
    if problems:
        raise UsageError("nothing can be run in these surroundings", problems)


def _problems() -> Iterator[Problem]:
    try:
        Path.cwd()
    except OSError as error:
        what = f"the working directory: {error.strerror or error}"
        yield Problem(what, "a directory that exists", "cd to one, and run the command again")
    values = {}
    for name in _NUMBERS:
        text = os.environ.get(name, "").strip() or "0"
        if text.isascii() and text.isdigit() and int(text) < 1 << 16:
            values[name] = int(text)
        else:
            what = f"the environment variable {name}={os.environ[name]!r}"
            yield Problem(what, "a whole number, as torchrun and accelerate launch set it", f"unset {name}")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if values.get(size) and values.get(rank, 0) >= values[size]:
            what = f"the environment variables {rank}={values[rank]} and {size}={values[size]}"
            yield Problem(what, f"a {rank} below {size}", "unset both, or start the processes with torchrun")


def first_to_fail() -> bool:
    """Return whether this rank is the first to report a failure; the others soon fail too.

    Uses the store of torchrun and accelerate, which outlives their processes; True without one.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch import distributed

    connect: Any = distributed.TCPStore  # type: ignore[attr-defined]
    environment = os.environ
    try:
        store = connect(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=5),
            wait_for_workers=False,
        )
        key = f"isotype/failed/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return bool(store.add(key, 1) == 1)
    except (KeyError, ValueError, RuntimeError):  # the launcher is gone: twice is better than never
        return True
