"""Records one process of an `isotype run`, from the import of torch to the report at the end."""

import dis
import linecache
import os
import re
import runpy
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from isotype.compat.imports import when_imported
from isotype.compat.replaced import Replacements
from isotype.compat.standard import around_processes, around_programs
from isotype.core import PACKAGE
from isotype.core.console import TerminalConsole
from isotype.core.errors import IsotypeError, causes, error_line
from isotype.preflight.script.family import Family, Options, family, watched_command
from isotype.report.text import say, short_source

if TYPE_CHECKING:
    from isotype.preflight.script.diagnosis import Diagnosis


NOTHING_SEEN = "no training step was recorded"
_MAY_TRAIN = re.compile(
    r"(ba|da|z|k|fi)?sh|pythonw?[\d.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec|srun|ray|uv|conda|env"
)
_NEVER_TRAINS = "torch.utils.data."  # the module of data loader workers


class Session:
    """Records one process. Each process that it starts gets a session too.

    A process of multiprocessing unpickles an object that starts the session. For other processes, the session changes
    the command that starts them. If recording fails, isotype prints a line, and the script continues. The exit status
    is always the script's.

    Attributes:
        unwatched: names of programs that were not recorded and may have trained.
        watched: number of recorded processes that this process has started.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.unwatched: list[str] = []
        self.watched = 0
        self._family: Family = family()
        self._hooks = Replacements()
        self._diagnosis: Diagnosis | None = None
        self._failed = False
        self._of_thread: BaseException | None = None  # ended a thread, which leaves the exit status unchanged

    def watch(self) -> None:
        """Begin to record when this process imports torch, and record the processes that the script starts."""
        around_programs(self._hooks, self._popen, self._system)
        around_processes(self._hooks, self._start, self._bootstrap)
        self._hooks.wrap(threading, "excepthook", self._thread_failed)
        self._hooks.callback(when_imported("torch", lambda: self.safely(self._begin)))

    def leave(self) -> None:
        self._hooks.close()
        self._family.leave()

    def _begin(self) -> None:
        from isotype.preflight.script.diagnosis import Diagnosis

        self._diagnosis = Diagnosis(self.options, _errors(self._family), self._family)
        self._diagnosis.begin()

    def stop(self) -> None:
        if self._diagnosis is not None:
            self.safely(self._diagnosis.stop)

    def failed(self, error: BaseException) -> BaseException:
        """Remove the hooks, and return the script's `error` with the traceback that it would have without isotype."""
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
        reason = self._of_thread if leaving is None or code in (None, 0) else leaving.__context__

        def end() -> None:
            if self._diagnosis is None or not self._diagnosis.left(code, reason):
                self._say_if_nothing_was_seen()

        self.stop()
        self.safely(end)

    def _thread_failed(self, hook: Callable[[Any], None], args: Any) -> None:
        """Print the error that ended a thread, as Python does. The explanation follows at the end of the script."""
        if (error := args.exc_value) is not None:
            trace = cleaned(error).__traceback__
            if self._of_thread is None and any(map(_may_be_explained, causes(error))):
                self._of_thread = error  # a reference to the tensors of its frames, too
            args = threading.ExceptHookArgs((args.exc_type, error, trace, args.thread))
        hook(args)

    def _say_if_nothing_was_seen(self, error: BaseException | None = None) -> None:
        if not self._family.is_top or self._failed or self._family.knows("explained"):
            return
        if not self._family.knows("seen"):
            self._say(f"{NOTHING_SEEN}: {self._why_nothing(error)}")
        elif error is not None:
            why = "this machine lacks a package, or has another version of the package"
            self._say(
                f"{_ended(error)}: {why if isinstance(error, ImportError) else 'no finding explains this error'}"
            )

    def _why_nothing(self, error: BaseException | None) -> str:
        if self.unwatched:
            programs = ", ".join(self.unwatched)
            return (
                f"the script started other programs ({programs}), which isotype does not record; if one of them trains, "
                "write `isotype run` instead of `python` in its command"
            )
        started = f" in the processes that the script started ({self.watched})" if self.watched else ""
        if self._diagnosis is None:
            failed = error and f"{type(error).__name__} ended the script before it imported torch"
            return failed or f"the script never imported torch{started and f', nor trained{started}'}"
        if self._diagnosis.watch.transformed:
            return "transforms of torch.func (vmap, grad) call the modules, and isotype does not record such calls"
        if error is not None and not started:
            return f"{_ended(error)} first"
        ended = " before the recording stopped" if self._diagnosis.watch.notes else ""
        return self._diagnosis.gpu.why_nothing() or (
            f"no module with parameters that require a gradient was called{ended}{started and f', nor{started}'}"
        )

    def safely(self, act: Callable[[], Any]) -> Any:
        """Return the result of `act`. If `act` raises an error, print a line and return None."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - an error of the watch must not change how the script ends
            self._failed = True
            ours = isinstance(error, IsotypeError)
            what = str(error) if ours else error_line(error)
            self._say(f"isotype failed, but the script did not: {what}")
            return None

    def _say(self, text: str) -> None:
        say(_errors(self._family), f"isotype: {text}")

    # --------------------------------------------------------------------------------- processes that the script starts

    def _popen(self, start: Callable[..., None], process: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        ours = self.safely(lambda: self._ours(args, rest, kwargs))
        start(process, args if ours is None else ours, *rest, **kwargs)

    def _ours(self, args: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
        """Return a new process's command, changed to run under `isotype run`; None if the command stays unchanged."""
        if kwargs.get("shell"):
            self._remember("sh")
            return None
        if not isinstance(args, (list, tuple)) or not args or kwargs.get("executable") or len(rest) > 1:
            return None
        words = [os.fsdecode(word) for word in args]
        ours = watched_command(words, self.options.flags())
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
            process._isotype = _Joins(self.options)
        start(process)

    def _bootstrap(self, bootstrap: Callable[..., int], process: Any, *args: Any, **kwargs: Any) -> int:
        """Call `Process._bootstrap` in the new process, report at the end, and return its exit status."""
        run = process.run
        ends: list[Callable[[], None]] = []

        def watched() -> None:
            try:
                run()
            except SystemExit as leaving:
                ends.append(partial(self.left, leaving.code, leaving))
                raise
            except Exception as error:
                ends.append(partial(self.crashed, self.failed(error)))
                raise
            ends.append(partial(self.left, 0))

        process.run = watched
        status = bootstrap(process, *args, **kwargs)
        for end in ends:
            end()
        return status


class _Joins:
    """An object that is pickled for a spawned process. When the new process unpickles this object, recording starts."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __reduce__(self) -> tuple[Any, ...]:
        return join, (self._options,)


def join(options: Options) -> None:
    """Start to record in this process, with the options of the process that has spawned it."""
    Session(options).watch()


def _ended(error: BaseException) -> str:
    from isotype.preflight.script.setup_errors import line_of_script  # imports torch, like the script

    return f"{type(error).__name__} at {short_source(line_of_script(error))} ended the script"


def _errors(family: Family) -> Console:
    # If a launcher starts `isotype run`, every rank is a run of its own. Only rank 0 reports.
    return TerminalConsole(stderr=True, quiet=family.is_top and os.environ.get("RANK", "0") != "0")


def show(error: BaseException) -> None:
    """Print an error by `sys.excepthook`, as Python does."""
    if isinstance(error, ImportError) and error.__traceback__ is None:
        sys.stderr.write(f"{sys.executable}: {error}\n")
        return
    sys.excepthook(type(error), error, error.__traceback__)


_OURS = tuple(str(PACKAGE / room) for room in ("trace", "preflight", "cli", "compat"))
_RUNPY = runpy.run_path.__code__.co_filename

_Entry = tuple[FrameType, int, int]


def _may_be_explained(error: BaseException) -> bool:
    modules = (frame.f_globals.get("__name__", "") for frame, *_ in _entries(error.__traceback__))
    in_torch = any(module.startswith("torch.") for module in modules)
    return isinstance(error, RuntimeError) or (in_torch and isinstance(error, Exception))


def cleaned(error: BaseException) -> BaseException:
    """Remove isotype's frames from the tracebacks of an exception and its causes, and return the exception."""
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
    """Return True if a frame belongs to torch's compiler, through which torch calls handlers of dispatch modes."""
    return _is(entry, "torch/_compile.py", "inner") or _is(entry, "torch/_dynamo/eval_frame.py", "_fn")


def _is_bare(frame: FrameType) -> bool:
    """Return True if the module of the frame has no hooks of its own. torch then calls `inner` only because of isotype's hooks."""
    # Imported here, because a script without torch must not import torch. Such a script has no frames of modules.
    from isotype.compat.torch import ALL_HOOKS

    module = frame.f_locals.get("self")
    return module is not None and not any(getattr(module, name, None) for name in ALL_HOOKS)


def _at_plain_call(entry: _Entry) -> _Entry:
    """Return an entry of `Module._call_impl`, moved to the line that calls the forward of a module without hooks."""
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
