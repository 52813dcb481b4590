"""What the processes of one `isotype run` tell each other, by empty files in a folder of their own.

A training may run in this process, in one that multiprocessing starts, or in many that a launcher starts: one of
them speaks about the first step, and one explains a crash.
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
"""Environment variable with the folder: whoever finds it set was started by another `isotype run`."""

Fact = Literal["speaks", "explained", "seen"]


@dataclass(frozen=True)
class Family:
    """The processes of one run.

    Attributes:
        folder: where they meet.
        top: the process id that the user started; None in all others.
    """

    folder: Path
    top: int | None

    @property
    def is_top(self) -> bool:
        """True if this process is the one that the user started."""
        return self.top == os.getpid()

    def claim(self, fact: Fact) -> bool:
        """Return whether this process is the first to say so."""
        try:
            (self.folder / fact).touch(exist_ok=False)
        except FileExistsError:
            return False
        except FileNotFoundError:
            return True  # the top has ended before this process: nobody else is there
        return True

    def knows(self, fact: Fact) -> bool:
        """Return whether any process has said so."""
        return (self.folder / fact).exists()

    def leave(self) -> None:
        """The top ends: the folder goes."""
        if self.is_top:
            os.environ.pop(VARIABLE, None)
            shutil.rmtree(self.folder, ignore_errors=True)


def family() -> Family:
    """Return the family that this process was started in; else a new one with this process at its top."""
    known = os.environ.get(VARIABLE)
    if known is not None:
        return Family(Path(known), None)
    folder = Path(tempfile.mkdtemp(prefix="isotype-run-"))
    os.environ[VARIABLE] = str(folder)
    return Family(folder, os.getpid())


PREFLIGHT_SECONDS = 10.0
"""Seconds that the trace before the first step may take: enough for thousands of operators."""


@dataclass(frozen=True)
class Options:
    """What `isotype run` was asked.

    Attributes:
        target: path of the script, or name of the module.
        module: whether `target` is a module (`-m`).
        arguments: the script's own.
        steps: optimizer steps to watch.
        device: profile to judge for; None for the device the model is on.
        seconds: that tracing the first step on fake tensors may take before it runs; 0 for no such trace.
        watch: whether the values of the whole training are watched, and a loss that is no number ends it.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    steps: int = 1
    device: str | None = None
    seconds: float = PREFLIGHT_SECONDS
    watch: bool = False

    def flags(self) -> Sequence[str]:
        """Return the arguments of `isotype run` that ask for the same, without what is run."""
        device = () if self.device is None else ("--device", self.device)
        watch = ("--watch",) if self.watch else ()
        return ("--steps", str(self.steps), *device, *watch, "--preflight-seconds", f"{self.seconds:g}")
