"""Command lines of Python: which script one runs, and the same script under `isotype run`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_RUN = ("-m", "isotype.cli.run")
# Without the folder of the script in the search path (-I, -P), or without the installed packages (-S), isotype run
# would not run the same; -c, -h and -V run no script.
_NOT_OURS = frozenset("IPSchV?")
_WITH_VALUE = frozenset("WX")


def watched_command(words: Sequence[str], flags: Sequence[str]) -> list[str] | None:
    """Return the command that runs the same under `isotype run`; None if it runs no script of this
    environment's Python.

    Args:
        words: the program and its arguments.
        flags: of `isotype run`.
    """
    program = shutil.which(words[0])
    if program is None:
        return None
    if is_python_script(Path(program)):
        return [sys.executable, *_RUN, *flags, "--", program, *words[1:]]
    if not _is_this_python(Path(program)):
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
    """Whether it is an executable text that this environment's Python runs, as pip makes them (`torchrun`)."""
    with path.open("rb") as file:
        head = file.read(1024).split(b"\n")
    # A path that is too long for a first line stands in the second, as a shell's command.
    return head[0].startswith(b"#!") and any(os.fsencode(sys.executable) in line for line in head[:2])


def _is_this_python(path: Path) -> bool:
    # A virtual environment's Python is a link: the same file in another folder is another environment.
    here = Path(sys.executable)
    return path.absolute().parent == here.parent and path.samefile(here)


def _split_python(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Return the interpreter with its options; and the script, or `-m` and the module, with its arguments."""
    position = 1
    while position < len(words):
        word = words[position]
        if not word.startswith("-"):
            return list(words[:position]), list(words[position:])
        if word == "-" or word.startswith("--"):
            return None
        # Short options may stand together: `-um package.train`.
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
