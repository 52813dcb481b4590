"""The processes of one `isotype run`: their options, their commands, and messages between them.

A training may run in this process, in processes of multiprocessing, or in the processes of a launcher. Only one process
reports on the first step, and only one process explains a crash. The messages are empty files in a shared folder.

Launchers (accelerate, torchrun, Lightning) start `python SCRIPT` by `subprocess`, and `isotype run` changes this
command. Other programs (a shell, the Python of another environment) are not recorded.
"""

import os
import shutil
import sys
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
    """The processes of one `isotype run`. They share `folder`. `top` is the id of this process if the user has started the process, else None."""

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
    """Return the family of this process's run, or a new family if the user has started this process."""
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
        module: True if `target` is a module (`-m`).
        seconds: time limit for the trace of the first step before this step runs; 0 for no trace.
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


_RUN = ("-m", "isotype.cli.run")
# Under `isotype run`, a script could not import from its folder with -I or -P, nor installed packages with -S. With -c,
# -h and -V, no script runs.
_NOT_OURS = frozenset("IPSchV?")
_WITH_VALUE = frozenset("WX")


def watched_command(words: Sequence[str], flags: Sequence[str]) -> list[str] | None:
    """Return the command that runs `words` under `isotype run`; None if `words` does not run a script with this Python."""
    program = shutil.which(words[0])
    if program is None:
        return None
    if is_python_script(Path(program)):
        return [sys.executable, *_RUN, *flags, "--", program, *words[1:]]
    path, here = Path(program), Path(sys.executable)
    # A virtual environment's Python is a link. A link in another folder belongs to another environment.
    if path.absolute().parent != here.parent or not path.samefile(here):
        return None
    split = _split_python(words)
    if split is None:
        return None
    python, target = split
    if target[0] != "-m":
        return [*python, *_RUN, *flags, "--", *target]
    ours = target[1].partition(".")[0] == "isotype"
    return None if ours else [*python, *_RUN, *flags, *target]


def is_python_script(path: Path) -> bool:
    """Return True if the `#!` line of a file names the Python of this environment, as in pip's script for `torchrun`."""
    with path.open("rb") as file:
        head = file.read(1024).split(b"\n")
    # If Python's path is too long for a `#!` line, pip writes it into a shell command in the second line.
    return head[0].startswith(b"#!") and any(os.fsencode(sys.executable) in line for line in head[:2])


def _split_python(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Split a command before its script or `-m module`. Return None if the command has neither, or has an option such as `-c`."""
    position = 1
    while position < len(words):
        word = words[position]
        if not word.startswith("-"):
            return list(words[:position]), list(words[position:])
        if word == "-" or word.startswith("--"):
            return None
        # Short options may be combined: `-um package.train`.
        for at, letter in enumerate(word[1:], 1):
            rest = word[at + 1 :]
            if letter in _NOT_OURS:
                return None
            if letter == "m":
                target = [*([rest] if rest else []), *words[position + 1 :]]
                before = [word[:at]] if at > 1 else []
                return ([*words[:position], *before], ["-m", *target]) if target else None
            if letter in _WITH_VALUE:
                position += not rest
                break
        position += 1
    return None
