"""Watches the processes that a watched script starts.

Launchers (accelerate, torchrun, Lightning) start `python SCRIPT` by `subprocess`, and `isotype run` changes this
command. Processes of multiprocessing unpickle an object that starts the watch. Other programs (a shell, another
environment's Python) are not watched, and the run reports their names.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from isotype.compat.replaced import Replacements
from isotype.compat.standard import around_processes, around_programs
from isotype.preflight.script.family import Options

T = TypeVar("T")

_MAY_TRAIN = re.compile(
    r"(ba|da|z|k|fi)?sh|pythonw?[\d.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec|srun|ray|uv|conda|env"
)
_NEVER_TRAINS = "torch.utils.data."  # the module of data loader workers


class Session(Protocol):
    """The methods of `isotype.preflight.script.session.Session` that this file calls."""

    options: Options

    def safely(self, act: Callable[[], T]) -> T | None: ...

    def left(self, code: Any, leaving: SystemExit | None = None) -> None: ...

    def failed(self, error: Exception) -> Any: ...

    def crashed(self, error: Any) -> Any: ...


class Processes:
    """Watches the processes that a script starts, from `watch` until `leave`.

    Attributes:
        unwatched: names of programs that were not watched and may have trained.
        watched: number of watched processes.

    Args:
        session: the session that watches this process.
        join: function that starts the watch in a spawned process, which gets the function by pickle.
    """

    def __init__(self, session: Session, join: Callable[[Options], None]) -> None:
        self.unwatched: list[str] = []
        self.watched = 0
        self._session, self._join = session, join
        self._replaced = Replacements()

    def watch(self) -> None:
        around_programs(self._replaced, self._popen, self._system)
        around_processes(self._replaced, self._start, self._bootstrap)

    def leave(self) -> None:
        self._replaced.put_back()

    def _popen(self, start: Callable[..., None], process: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        ours = self._session.safely(lambda: self._ours(args, rest, kwargs))
        start(process, args if ours is None else ours, *rest, **kwargs)

    def _ours(self, args: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
        """Return a new process's command, changed to run under `isotype run`; None if the command stays as it is."""
        if kwargs.get("shell"):
            self._remember("sh")
            return None
        if not isinstance(args, (list, tuple)) or not args or kwargs.get("executable") or len(rest) > 1:
            return None
        words = [os.fsdecode(word) for word in args]
        ours = watched_command(words, self._session.options.flags())
        if ours is None:
            self._remember(Path(words[0]).name)
            return None
        self.watched += 1
        return ours

    def _system(self, start: Callable[..., int], command: Any) -> int:
        self._remember("sh")
        return start(command)

    def _remember(self, program: str) -> None:
        if _MAY_TRAIN.fullmatch(program) and program not in self.unwatched:
            self.unwatched.append(program)

    def _start(self, start: Callable[..., None], process: Any) -> None:
        target = getattr(process, "_target", None)
        if not str(getattr(target, "__module__", "")).startswith(_NEVER_TRAINS):
            self.watched += 1
            process._isotype = _Joins(self._join, self._session.options)
        start(process)

    def _bootstrap(self, bootstrap: Callable[..., int], process: Any, *args: Any, **kwargs: Any) -> int:
        """Call `Process._bootstrap` in the new process, report at the end, and return its exit status."""
        run, session = process.run, self._session
        ends: list[Callable[[], None]] = []

        def watched() -> None:
            try:
                run()
            except SystemExit as leaving:
                ends.append(partial(session.left, leaving.code, leaving))
                raise
            except Exception as error:
                ends.append(partial(session.crashed, session.failed(error)))
                raise
            ends.append(partial(session.left, 0))

        process.run = watched
        status = bootstrap(process, *args, **kwargs)
        for end in ends:
            end()
        return status


class _Joins:
    """An object that is pickled for a spawned process. Unpickling it in the new process starts the watch."""

    def __init__(self, join: Callable[[Options], None], options: Options) -> None:
        self._join, self._options = join, options

    def __reduce__(self) -> tuple[Any, ...]:
        return self._join, (self._options,)


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
    """Return whether a file's `#!` line names this environment's Python, as in pip's script for `torchrun`."""
    with path.open("rb") as file:
        head = file.read(1024).split(b"\n")
    # If Python's path is too long for a `#!` line, pip writes it into a shell command in the second line.
    return head[0].startswith(b"#!") and any(os.fsencode(sys.executable) in line for line in head[:2])


def _split_python(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Split a command at its script or `-m module`. Return None without a script, or with an option such as `-c` or
    `-I`."""
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
