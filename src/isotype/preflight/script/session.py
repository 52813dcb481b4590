"""Watches one process of an `isotype run`, from the import of torch to the report at the end."""

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
from isotype.core.errors import IsotypeError, error_line
from isotype.preflight.script.family import Family, Options, family
from isotype.preflight.script.processes import Processes
from isotype.report.text import say, short_source

if TYPE_CHECKING:
    from isotype.preflight.script.diagnosis import Diagnosis


T = TypeVar("T")

NOTHING_SEEN = "no training step was seen"


class Session:
    """Watches one process.

    If the watch fails, a line is printed, and the script continues; the exit status is the script's.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._family: Family = family()
        self._processes = Processes(self, join)
        self._diagnosis: Diagnosis | None = None
        self._waits: Callable[[], None] | None = None
        self._failed = False

    def watch(self) -> None:
        """Begin the watch when this process imports torch, and watch the processes that the script starts."""
        self._processes.watch()
        self._waits = when_imported("torch", lambda: self.safely(self._begin))

    def leave(self) -> None:
        self._processes.leave()
        if self._waits is not None:
            self._waits()
        self._family.leave()

    def _begin(self) -> None:
        from isotype.preflight.script.diagnosis import Diagnosis

        self._diagnosis = Diagnosis(self.options, _errors(self._family), self._family)
        self._diagnosis.begin()

    def stop(self) -> None:
        if self._diagnosis is not None:
            self.safely(self._diagnosis.stop)

    def failed(self, error: BaseException) -> BaseException:
        """Remove the hooks, and return the script's `error` with the traceback that it would have without the watch."""
        self.stop()
        return cleaned(error)

    def crashed(self, error: BaseException) -> None:
        """Print an explanation of the error that ended the script, below its traceback. Call `failed` first."""

        def explain() -> None:
            if self._diagnosis is None or not self._diagnosis.crashed(error):
                self._say_if_nothing_was_seen(error)

        self.safely(explain)

    def left(self, code: Any, leaving: SystemExit | None = None) -> None:
        """Print findings after a script has exited. `code` is the argument of `sys.exit`."""
        reason = None if leaving is None or code in (None, 0) else leaving.__context__

        def end() -> None:
            if self._diagnosis is None or not self._diagnosis.left(code, reason):
                self._say_if_nothing_was_seen()

        self.stop()
        self.safely(end)

    def _say_if_nothing_was_seen(self, error: BaseException | None = None) -> None:
        if not self._family.is_top or self._failed:
            return
        if not self._family.knows("seen"):
            self._say(f"{NOTHING_SEEN}: {self._why_nothing(error)}")
        elif error is not None and not self._family.knows("explained"):
            why = "this machine lacks a package, or has another version of it"
            self._say(
                f"{_ended(error)}: {why if isinstance(error, ImportError) else 'no finding explains this error'}"
            )

    def _why_nothing(self, error: BaseException | None) -> str:
        processes = self._processes
        if processes.unwatched:
            programs = ", ".join(processes.unwatched)
            return (
                f"the script started other programs ({programs}), in which isotype records nothing; if one of them trains, "
                "write `isotype run` in place of `python` in its command"
            )
        started = f" in the processes that were started ({processes.watched})" if processes.watched else ""
        if self._diagnosis is None:
            return f"the script never imported torch{started and f', nor trained{started}'}"
        if self._diagnosis.watch.transformed:
            return "transforms of torch.func (vmap, grad) call the modules, and isotype does not record such calls"
        if error is not None and not started:
            return f"{_ended(error)} first"
        ended = " before the recording stopped" if self._diagnosis.watch.notes else ""
        return self._diagnosis.gpu.why_nothing() or (
            f"no module with parameters that require a gradient was called{ended}{started and f', nor{started}'}"
        )

    def safely(self, act: Callable[[], T]) -> T | None:
        """Return the result of `act`. If it raises an error, print a line and return None."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - an error of the watch must not change how the script ends
            self._failed = True
            ours = isinstance(error, IsotypeError)
            what = str(error) if ours else error_line(error)
            self._say(f"the watch failed, but the script did not: {what}")
            return None

    def _say(self, text: str) -> None:
        say(_errors(self._family), f"isotype: {text}")


def _ended(error: BaseException) -> str:
    from isotype.preflight.script.setup_errors import line_of_script  # imports torch, like the script

    return f"{type(error).__name__} at {short_source(line_of_script(error))} ended the script"


def _errors(family: Family) -> Console:
    # If a launcher starts `isotype run`, every rank is a run of its own. Only rank 0 reports.
    return TerminalConsole(stderr=True, quiet=family.is_top and os.environ.get("RANK", "0") != "0")


def show(error: BaseException) -> None:
    """Print an error as Python would, by `sys.excepthook`."""
    if isinstance(error, ImportError) and error.__traceback__ is None:
        sys.stderr.write(f"{sys.executable}: {error}\n")
        return
    sys.excepthook(type(error), error, error.__traceback__)


def join(options: Options) -> None:
    """Start the watch in this process, with the options of the process that has spawned it."""
    Session(options).watch()


_OURS = tuple(str(PACKAGE / room) for room in ("trace", "preflight", "cli", "compat"))
_RUNPY = runpy.run_path.__code__.co_filename

_Entry = tuple[FrameType, int, int]


def cleaned(error: BaseException) -> BaseException:
    """Remove isotype's frames from the tracebacks of an exception and its causes, and return it."""
    visited: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in visited:
            visited.add(id(link))
            entries = _without_ours(_entries(link.__traceback__))
            link.__traceback__ = None
            for frame, last, line in reversed(entries):
                link.__traceback__ = TracebackType(link.__traceback__, frame, last, line)
            waiting += [link.__cause__, link.__context__]
    return error


def _entries(trace: TracebackType | None) -> list[_Entry]:
    entries = []
    while trace is not None:
        entries.append((trace.tb_frame, trace.tb_lasti, trace.tb_lineno))
        trace = trace.tb_next
    return entries


def _without_ours(entries: list[_Entry]) -> list[_Entry]:
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
                del kept[-2:]  # torch calls the function again, without looking for modes
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
    """Return whether a frame belongs to torch's compiler, through which torch calls handlers of dispatch modes."""
    return _is(entry, "torch/_compile.py", "inner") or _is(entry, "torch/_dynamo/eval_frame.py", "_fn")


def _is_bare(frame: FrameType) -> bool:
    """Return whether the frame's module has no hooks. Then torch calls `inner` only for hooks of the watch."""
    # Imported here, because a script without torch must not import torch. Such a script has no frames of modules.
    from isotype.compat.torch import ALL_HOOKS

    module = frame.f_locals.get("self")
    return module is not None and not any(getattr(module, name, None) for name in ALL_HOOKS)


def _at_plain_call(entry: _Entry) -> _Entry:
    """Return an entry of `Module._call_impl`, moved to its line that calls the forward of a module without hooks."""
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
