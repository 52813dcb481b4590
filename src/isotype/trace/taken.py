"""Origin of a dtype in code: `y.to(x.dtype)` takes x's, `y.to(torch.float32)` chooses its own.

A dtype is one object for all tensors, so the reads of `Tensor.dtype` are recorded: the instruction in every
frame up to the module's. A cast looks for reads in its own arguments, or in values stored under their names
(`dtype = x.dtype`, `ctx.dtype`, a function's parameter).
"""

from __future__ import annotations

import ast
import dis
import linecache
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch

from isotype.compat.standard import frame_above
from isotype.compat.torch import MODULE_CALL
from isotype.core.source import is_library
from isotype.records.trace import Origin

DTYPE = torch.Tensor.dtype
"""The `__self__` of the function that function modes get for reads of `tensor.dtype`."""

_MODULE_CALL = MODULE_CALL
_MOST_FRAMES = 8
# Number of callers through which a dtype argument is followed.
_MOST_CALLERS = 4

Span = tuple[int, int, int, int]  # first line, its column, last line, its column: byte columns, as in Python


class _Call:
    """Marks one function call, as the frame's `f_trace`.

    Frames have no weak references, their addresses are reused, and a reference to a frame would keep all its
    tensors alive.
    """

    __slots__ = ("__weakref__", "_tracer")

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Pass an event on to the trace function that a debugger or a coverage tool has set for this frame."""
        if self._tracer is None:
            return None
        self._tracer = self._tracer(frame, event, arg) or self._tracer
        return self


@dataclass(frozen=True, slots=True)
class _Read:
    call: weakref.ref[_Call]
    code: CodeType
    at: int
    dtype: torch.dtype
    origin: Origin
    number: int


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a call in the source: its position, dtypes and names."""

    keyword: str | None
    span: Span
    literals: frozenset[torch.dtype]
    names: tuple[str, ...]


class DtypeReads:
    """Reads of `Tensor.dtype` in a step, the last one of each instruction."""

    def __init__(self) -> None:
        self._reads: dict[CodeType, dict[int, _Read]] = {}
        self._count = 0

    def note(self, origin: Origin) -> None:
        """Record that the running code has read the dtype made by `origin`."""
        self._count += 1
        for frame in _frames(frame_above(1)):
            read = _Read(
                weakref.ref(call_of(frame)), frame.f_code, frame.f_lasti, origin.dtype, origin, self._count
            )
            self._reads.setdefault(frame.f_code, {})[frame.f_lasti] = read

    def taken_by(self, dtype: torch.dtype) -> Origin | None:
        """Return the origin of the `dtype` in the innermost call of the model's code; None if the code chose it."""
        if not self._reads:
            return None
        frame = next(_frames(frame_above(1)), None)
        arguments = () if frame is None else _arguments(frame.f_code, frame.f_lasti)
        named = [each for each in arguments if each.keyword == "dtype"]
        read = None if frame is None else self._in(frame, named or arguments, dtype, _MOST_CALLERS)
        return None if read is None else read.origin

    def _in(
        self, frame: FrameType, arguments: Sequence[_Argument], dtype: torch.dtype, callers: int
    ) -> _Read | None:
        """Return the read from which the arguments of the call in `frame` have `dtype`."""
        call: Any = frame.f_trace
        here = [
            read
            for read in self._reads.get(frame.f_code, {}).values()
            if isinstance(call, _Call) and read.call() is call and read.dtype == dtype
        ]
        reads = [
            read
            for read in here
            if any(_lies_in(_position(read.code, read.at), each.span) for each in arguments)
        ]
        if reads:
            return max(reads, key=lambda read: read.number)
        if any(dtype in each.literals for each in arguments):
            return None
        for name in (name for each in arguments for name in each.names):
            read = self._stored(frame, here, name, dtype)
            if read is None and callers and name in _parameters(frame.f_code):
                read = self._of_parameter(frame, name, dtype, callers)
            if read is not None:
                return read
        return None

    def _stored(self, frame: FrameType, here: Sequence[_Read], name: str, dtype: torch.dtype) -> _Read | None:
        """Return the last read stored under `name`: in this call, for attributes and outer variables in the file."""
        local = name in frame.f_code.co_varnames or name in frame.f_code.co_cellvars
        reads = here if local else self._of_file(frame.f_code.co_filename, dtype)
        into = [read for read in reads if _is_stored(read.code, read.at, name)]
        return max(into, key=lambda read: read.number, default=None)

    def _of_file(self, filename: str, dtype: torch.dtype) -> list[_Read]:
        return [
            read
            for code, reads in self._reads.items()
            if code.co_filename == filename
            for read in reads.values()
            if read.dtype == dtype
        ]

    def _of_parameter(self, frame: FrameType, name: str, dtype: torch.dtype, callers: int) -> _Read | None:
        """Return the read from which a parameter got its dtype."""
        caller = next(_frames(frame.f_back), None)
        if caller is None:
            return None
        arguments = _arguments(caller.f_code, caller.f_lasti)
        by_name = [each for each in arguments if each.keyword == name]
        parameters = _parameters(frame.f_code)
        position = parameters.index(name) - (parameters[0] in ("self", "cls"))
        plain = [each for each in arguments if each.keyword is None]
        sources = by_name or plain[position : position + 1]
        return self._in(caller, sources, dtype, callers - 1) if sources else None


# ------------------------------------------------------------------------------------------------------ frames


def call_of(frame: FrameType) -> _Call:
    """Return the mark of the call in `frame`, made on first use."""
    if not isinstance(frame.f_trace, _Call):
        frame.f_trace = _Call(frame.f_trace)
    call: Any = frame.f_trace
    assert isinstance(call, _Call)
    return call


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the model's code from `frame` outwards, up to the running module's."""
    count = 0
    while frame is not None and count < _MOST_FRAMES:
        if frame.f_code is _MODULE_CALL and count:
            return
        if not is_library(frame.f_code.co_filename):
            count += 1
            yield frame
        frame = frame.f_back


# -------------------------------------------------------------------------------------------------- source code


@lru_cache(maxsize=4096)
def _position(code: CodeType, at: int) -> Span | None:
    """Return the source span of the instruction at byte `at`; None if unknown."""
    span = list(code.co_positions())[at // 2]
    line, last, column, end = span
    return None if None in span else (line, column, last, end)  # type: ignore[return-value]


def _lies_in(span: Span | None, outer: Span) -> bool:
    return span is not None and outer[:2] <= span[:2] and span[2:] <= outer[2:]


@lru_cache(maxsize=4096)
def _arguments(code: CodeType, at: int) -> tuple[_Argument, ...]:
    """Return the arguments of the call at byte `at`; none if it is no call or without source."""
    span = _position(code, at)
    if span is None:
        return ()
    line, column, last, end = span
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(line, last + 1)]
    if not all(lines):
        return ()
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][column:]
    try:
        tree = ast.parse(b"(" + b"".join(lines) + b"\n)", mode="eval")
    except SyntaxError:
        return ()  # the file differs from the running code
    call = tree.body
    if not isinstance(call, ast.Call):
        return ()
    passed = [(None, each) for each in call.args] + [(each.arg, each.value) for each in call.keywords]
    return tuple(
        _Argument(keyword, _span_of(node, line, column), frozenset(_literals(node)), tuple(_names(node)))
        for keyword, node in passed
    )


def _span_of(node: ast.expr, line: int, column: int) -> Span:
    """Return the span in the file of a node in an expression that begins at `line` and `column`."""

    def moved(row: int, offset: int) -> tuple[int, int]:
        return line + row - 1, offset + (column - 1 if row == 1 else 0)

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return *moved(node.lineno, node.col_offset), *moved(node.end_lineno, node.end_col_offset)


def _literals(node: ast.expr) -> Iterator[torch.dtype]:
    """Yield the dtypes written in an expression: `torch.float32`."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "torch":
            dtype = getattr(torch, each.attr, None)
            if isinstance(dtype, torch.dtype):
                yield dtype


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the variables in an expression, and attributes of variables (`ctx.dtype`)."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield f"{node.value.id}.{node.attr}"
    else:
        for child in ast.iter_child_nodes(node):
            yield from _names(child)


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@lru_cache(maxsize=1024)
def _stores(code: CodeType) -> tuple[tuple[int, int, str], ...]:
    """Return (byte, line, name) of every storing instruction; an attribute's name includes its variable."""
    stores: list[tuple[int, int, str]] = []
    before: Any = None
    for each in dis.get_instructions(code):
        line = each.positions.lineno if each.positions is not None else None
        if line is not None and each.opname == "STORE_ATTR":
            stores.append((each.offset, line, f"{getattr(before, 'argval', '')}.{each.argval}"))
        elif line is not None and each.opname.startswith("STORE_") and each.argval is not None:
            # Python 3.13 merges two stores into one instruction.
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            stores += [(each.offset, line, str(name)) for name in names]
        before = each
    return tuple(stores)


def _is_stored(code: CodeType, at: int, name: str) -> bool:
    """Return whether the instruction at byte `at` reads a part of the value stored under `name`."""
    span = _position(code, at)
    return span is not None and any(
        store > at and line <= span[0] and stored == name for store, line, stored in _stores(code)
    )
