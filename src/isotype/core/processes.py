"""One of several processes that a launcher has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from isotype.core.errors import Problem, UsageError

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def check_surroundings() -> None:
    """Refuse a working directory that is gone, and variables of a launcher that are no numbers or do not fit each other.

    Raises:
        UsageError: with every problem.
    """
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
    """Whether this process is the first of its run to ask: one speaks of a failure, which soon ends the others too.

    torchrun and accelerate keep a store that outlives their processes; of a process without one, yes.
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
    except (KeyError, ValueError, RuntimeError):  # the launcher has gone: better twice than not at all
        return True
