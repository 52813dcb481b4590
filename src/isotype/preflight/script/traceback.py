"""A traceback as it would have been without us: our frames, and those that torch adds because of us, are left out."""

from __future__ import annotations

import dis
import linecache
import runpy
from functools import cache
from types import CodeType, FrameType, TracebackType

from isotype.core.package import PACKAGE

_OURS = tuple(str(PACKAGE / room) for room in ("trace", "preflight", "cli", "compat"))
_RUNPY = runpy.run_path.__code__.co_filename

_Entry = tuple[FrameType, int, int]


def cleaned(error: BaseException) -> BaseException:
    """The same exception; its traceback, and those of all it was raised from, without frames that are ours."""
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
                del kept[-2:]  # the function, which asked for modes; it follows once more, asking no longer
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
    """What torch puts around a mode's handler to keep the compiler out of it."""
    return _is(entry, "torch/_compile.py", "inner") or _is(entry, "torch/_dynamo/eval_frame.py", "_fn")


def _is_bare(frame: FrameType) -> bool:
    """Whether the module that is called has no hooks of its own: then only ours led into `inner`."""
    # A script without torch has no such frames, and is run without importing it.
    from isotype.compat.torch import ALL_HOOKS

    module = frame.f_locals.get("self")
    return module is not None and not any(getattr(module, name, None) for name in ALL_HOOKS)


def _at_plain_call(entry: _Entry) -> _Entry:
    """`Module._call_impl` at the line that calls a module without hooks."""
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
