"""Communication between the processes of one `isotype run`, by empty files in a shared folder.

A training may run in this process, in a process of multiprocessing, or in many processes of a launcher. Only one of the
processes reports on the first step, and only one explains a crash.
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
"""Environment variable with the path of the shared folder. Every process of a run inherits this variable."""

Fact = Literal["speaks", "explained", "seen"]


@dataclass(frozen=True)
class Family:
    """The processes of one run, which share `folder`. `top` is this process's id if the user started it, else None."""

    folder: Path
    top: int | None

    @property
    def is_top(self) -> bool:
        return self.top == os.getpid()

    def claim(self, fact: Fact) -> bool:
        """Claim `fact`, and return True if no process of the run has claimed it before."""
        try:
            (self.folder / fact).touch(exist_ok=False)
        except FileExistsError:
            return False
        except FileNotFoundError:
            pass  # the top process has ended and removed the folder: no other process is left
        return True

    def knows(self, fact: Fact) -> bool:
        return (self.folder / fact).exists()

    def leave(self) -> None:
        if self.is_top:
            os.environ.pop(VARIABLE, None)
            shutil.rmtree(self.folder, ignore_errors=True)


def family() -> Family:
    """Return the family of this process's run; a new family if the user started this process."""
    if VARIABLE in os.environ:
        return Family(Path(os.environ[VARIABLE]), None)
    folder = Path(tempfile.mkdtemp(prefix="isotype-run-"))
    os.environ[VARIABLE] = str(folder)
    return Family(folder, os.getpid())


PREFLIGHT_SECONDS = 10.0
"""Time limit in seconds for tracing the first step before it runs: enough for thousands of operators."""


@dataclass(frozen=True)
class Options:
    """Options of `isotype run`.

    Attributes:
        target: path of the script, or name of the module.
        module: whether `target` is a module (`-m`).
        seconds: time limit for tracing the first step before it runs; 0 disables this trace.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    steps: int = 1
    device: str | None = None
    seconds: float = PREFLIGHT_SECONDS
    watch: bool = False

    def flags(self) -> Sequence[str]:
        device = () if self.device is None else ("--device", self.device)
        watch = ("--watch",) if self.watch else ()
        return ("--steps", str(self.steps), *device, *watch, "--preflight-seconds", f"{self.seconds:g}")
