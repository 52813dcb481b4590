"""Messages between the processes of one `isotype run`: empty files in a shared folder.

A training may run in this process, in processes of multiprocessing, or in the processes of a launcher. Only one process
reports on the first step, and only one process explains a crash.
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
"""Environment variable with the path of the shared folder. All processes of a run inherit it."""

Fact = Literal["speaks", "explained", "seen"]


@dataclass(frozen=True)
class Family:
    """The processes of one run. They share `folder`. `top` is this process's id if the user has started it, else None."""

    folder: Path
    top: int | None

    @property
    def is_top(self) -> bool:
        return self.top == os.getpid()

    def claim(self, fact: Fact) -> bool:
        """Claim `fact`. Return True if no other process of the run has claimed the same fact before."""
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
    """Return the family of this process's run; a new one if the user has started this process."""
    if VARIABLE in os.environ:
        return Family(Path(os.environ[VARIABLE]), None)
    folder = Path(tempfile.mkdtemp(prefix="isotype-run-"))
    os.environ[VARIABLE] = str(folder)
    return Family(folder, os.getpid())


@dataclass(frozen=True)
class Options:
    """Options of `isotype run`.

    Attributes:
        target: path of the script, or name of the module.
        module: whether `target` is a module (`-m`).
        seconds: time limit for the trace of the first step before it runs; 0 for no trace.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    steps: int
    device: str | None
    seconds: float
    watch: bool

    def flags(self) -> Sequence[str]:
        device = () if self.device is None else ("--device", self.device)
        watch = ("--watch",) if self.watch else ()
        return ("--steps", str(self.steps), *device, *watch, "--preflight-seconds", f"{self.seconds:g}")
