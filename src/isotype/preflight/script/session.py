"""The watch over one process of an `isotype run`: waits for torch, then for a training step, and reports."""

from __future__ import annotations

import dis
import linecache
import os
import runpy
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from isotype.compat.imports import when_imported
from isotype.core import PACKAGE
from isotype.core.console import TerminalConsole
from isotype.preflight.script.family import Family, Options, family
from isotype.preflight.script.processes import Processes
from isotype.report.text import say

if TYPE_CHECKING:
    from isotype.preflight.script.diagnosis import Diagnosis


T = TypeVar("T")

NOTHING_SEEN = "no training step was seen"


class Session:
    """The watch over one process.

    It never ends the script or changes its exit: its own errors are one printed line.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._family: Family = family()
        self._processes = Processes(self, join)
        self._diagnosis: Diagnosis | None = None
        self._waits: Callable[[], None] | None = None
        self._failed = False

    def watch(self) -> None:
        """Wait for torch in this process, and watch processes that the script starts."""
        self._processes.watch()
        self._waits = when_imported("torch", lambda: self.safely(self._begin))

    def leave(self) -> None:
        """Remove the watch from the process."""
        self._processes.leave()
        if self._waits is not None:
            self._waits()
        self._family.leave()

    def _begin(self) -> None:
        from isotype.preflight.script.diagnosis import Diagnosis

        self._diagnosis = Diagnosis(self.options, _errors(self._family), self._family)
        self._diagnosis.begin()

    def stop(self) -> None:
        """Stop watching: the script has ended."""
        if self._diagnosis is not None:
            self.safely(self._diagnosis.stop)

    def failed(self, error: BaseException) -> BaseException:
        """Return `error` of the script with its traceback as without the watch; stops watching."""
        self.stop()
        return cleaned(error)

    def crashed(self, error: BaseException) -> None:
        """Explain the error that ended the script under its traceback; `failed` has been called."""
        self.safely(lambda: self._explain(error))

    def _explain(self, error: BaseException) -> None:
        diagnosis = self._diagnosis
        explained = diagnosis is not None and diagnosis.crashed(error)
        if not explained:
            self._say_if_nothing_was_seen()

    def left(self, code: Any, leaving: SystemExit | None = None) -> None:
        """Report at the end of a script that exited with `code`, as for `sys.exit`."""
        self.stop()
        self.safely(lambda: self._end(code, leaving))

    def _end(self, code: Any, leaving: SystemExit | None) -> None:
        diagnosis, explained = self._diagnosis, False
        if diagnosis is not None:
            reason = None if leaving is None or code in (None, 0) else leaving.__context__
            explained = diagnosis.left(code, reason)
        if not explained:
            self._say_if_nothing_was_seen()

    def _say_if_nothing_was_seen(self) -> None:
        if self._family.is_top and not self._failed and not self._family.knows("seen"):
            self._say(f"{NOTHING_SEEN}: {self._why_nothing()}")

    def _why_nothing(self) -> str:
        """Return why the script was not watched, and how to watch it."""
        processes = self._processes
        if processes.unwatched:
            programs = ", ".join(processes.unwatched)
            return (
                f"the script started {programs}, which isotype cannot look into; if the training runs there, "
                "write `isotype run` in place of `python` in its command"
            )
        started = (
            f", nor in the processes that were started ({processes.watched})" if processes.watched else ""
        )
        if self._diagnosis is None:
            return f"the script never imported torch{', nor trained' + started[5:] if started else ''}"
        return f"no module was called with parameters that require a gradient{started}"

    def safely(self, act: Callable[[], T]) -> T | None:
        """Return the result of `act`; print a line and return None if it fails."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - an error of the watch must not change how the script ends
            text = next(iter(str(error).splitlines()), "")
            self._failed = True
            self._say(f"the watch failed, the script did not: {type(error).__name__}: {text}")
            return None

    def _say(self, text: str) -> None:
        console = _errors(self._family)
        say(console, f"isotype: {text}")


def _errors(family: Family) -> Console:
    # Under the user's launcher every rank is a separate run; one of them reports.
    return TerminalConsole(stderr=True, quiet=family.is_top and os.environ.get("RANK", "0") != "0")


def show(error: BaseException) -> None:
    """Print an error as Python would, by its hook."""
    if isinstance(error, ImportError) and error.__traceback__ is None:
        sys.stderr.write(f"{sys.executable}: {error}\n")
        return
    sys.excepthook(type(error), error, error.__traceback__)


def join(options: Options) -> None:
    """Watch this process with the options of the one that spawned it."""
    Session(options).watch()


_OURS = tuple(str(PACKAGE / room) for room in ("trace", "preflight", "cli", "compat"))
_RUNPY = runpy.run_path.__code__.co_filename

_Entry = tuple[FrameType, int, int]


def cleaned(error: BaseException) -> BaseException:
    """Return the same exception with its tracebacks, including causes, without isotype's frames."""
    known: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            each.__traceback__ = _rebuilt(_kept(_entries(each.__traceback__)))
            waiting += [each.__cause__, each.__context__]
    return error


def _entries(trace: TracebackType | None) -> list[_Entry]:
    entries = []
    while trace is not None:
        entries.append((trace.tb_frame, trace.tb_lasti, trace.tb_lineno))
        trace = trace.tb_next
    return entries


def _rebuilt(entries: list[_Entry]) -> TracebackType | None:
    trace = None
    for frame, last, line in reversed(entries):
        trace = TracebackType(trace, frame, last, line)
    return trace


def _kept(entries: list[_Entry]) -> list[_Entry]:
    first = 0
    while first < len(entries) and _file(entries[first]).startswith((_RUNPY, *_OURS)):
        first += 1
    kept: list[_Entry] = []
    ours = False
    for entry in entries[first:]:
        frame = entry[0]
        if _file(entry).startswith(_OURS):
            while not ours and kept and _leads_to_modes(kept[-1]):
                del kept[-1]
            if not ours and kept and _is(kept[-1], "torch/overrides.py", "handle_torch_function"):
                del kept[-2:]  # the function, which checked for modes; it follows again without the check
            ours = True
            continue
        if ours and (_leads_to_modes(entry) or _is(entry, "torch/_ops.py", "__call__")):
            continue
        ours = False
        if _is(entry, "torch/nn/modules/module.py", "inner") and _is_bare(frame) and kept:
            kept[-1] = _at_plain_call(kept[-1])
            continue
        kept.append(entry)
    return kept


def _file(entry: _Entry) -> str:
    return entry[0].f_code.co_filename


def _is(entry: _Entry, file: str, name: str) -> bool:
    return entry[0].f_code.co_name == name and _file(entry).replace("\\", "/").endswith(file)


def _leads_to_modes(entry: _Entry) -> bool:
    """Return whether a frame is torch's wrapper around a mode's handler that disables the compiler."""
    return _is(entry, "torch/_compile.py", "inner") or _is(entry, "torch/_dynamo/eval_frame.py", "_fn")


def _is_bare(frame: FrameType) -> bool:
    """Return whether the called module has no hooks of its own: then only the watch's hooks led into `inner`."""
    # A script without torch has no such frames, and runs without importing it.
    from isotype.compat.torch import ALL_HOOKS

    module = frame.f_locals.get("self")
    return module is not None and not any(getattr(module, name, None) for name in ALL_HOOKS)


def _at_plain_call(entry: _Entry) -> _Entry:
    """Return `Module._call_impl` at the line that calls a module without hooks."""
    frame = entry[0]
    place = _plain_call(frame.f_code)
    return entry if place is None else (frame, *place)


@cache
def _plain_call(code: CodeType) -> tuple[int, int] | None:
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions is not None else None
        if line is not None and instruction.opname.startswith("CALL_FUNCTION_EX"):
            text = linecache.getline(code.co_filename, line).strip()
            if text == "return forward_call(*args, **kwargs)":
                return instruction.offset, line
    return None
