"""Finds the tensor from which a cast reads its dtype: `x` for `y.to(x.dtype)`, none for `y.to(torch.float32)`.

Each read of `Tensor.dtype` is recorded with the current instruction of the function and of each caller. The read for a
cast is searched in the cast's arguments, then in code that set the variables or attributes there (`ctx.dtype`).
"""

import ast
import dis
import linecache
import weakref
from collections.abc import Iterable, Iterator, Sequence
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
"""A function mode sees a read of `tensor.dtype` as a call of the method `DTYPE.__get__`."""

_MOST_FRAMES = 8
# Number of callers in which the value of a function's parameter is looked up.
_MOST_CALLERS = 4

Span = tuple[int, int, int, int]  # first line, its column, last line, its column; columns count bytes


class _Call:
    """Identifies one function call. The call's frame stores this mark as its `f_trace`.

    A mark is necessary, because Python has no weak references to frames and reuses their addresses. A strong reference
    would keep all tensors of the frame alive.
    """

    __slots__ = ("__weakref__", "_tracer")

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Pass an event on to the trace function of a debugger or coverage tool."""
        if self._tracer is None:
            return None
        self._tracer = self._tracer(frame, event, arg) or self._tracer
        return self


@dataclass(frozen=True, slots=True)
class _Read:
    call: weakref.ref[_Call]
    code: CodeType
    at: int
    origin: Origin
    number: int


class DtypeReads:
    """Records the last read of `Tensor.dtype` by each instruction in the code of a step."""

    def __init__(self) -> None:
        self._reads: dict[CodeType, dict[int, _Read]] = {}
        self._count = 0

    def note(self, origin: Origin) -> None:
        self._count += 1
        for frame in _frames(frame_above(1)):
            call, code, at = weakref.ref(call_of(frame)), frame.f_code, frame.f_lasti
            self._reads.setdefault(code, {})[at] = _Read(call, code, at, origin, self._count)

    def origin_of(self, dtype: torch.dtype) -> Origin | None:
        """Return the origin of the running call's argument `dtype`; None if the code names the dtype itself."""
        frame = next(_frames(frame_above(1)), None) if self._reads else None
        if frame is None:
            return None
        arguments = _arguments(frame.f_code, frame.f_lasti)
        named = [argument for argument in arguments if argument.arg == "dtype"]
        read = self._in(frame, named or arguments, dtype, _MOST_CALLERS)
        return None if read is None else read.origin

    def _in(
        self, frame: FrameType, arguments: Sequence[ast.keyword], dtype: torch.dtype, callers: int
    ) -> _Read | None:
        """Return the read of `dtype` in the arguments of the call in `frame`, or in code that set their variables."""
        call: Any = frame.f_trace
        seen = self._reads.get(frame.f_code, {}).values() if isinstance(call, _Call) else ()
        in_call = [read for read in seen if read.call() is call and read.origin.dtype == dtype]
        values = [argument.value for argument in arguments]
        spans = [span_of(value) for value in values]
        reads = [r for r in in_call if any(is_inside(position(r.code, r.at), span) for span in spans)]
        if reads:
            return max(reads, key=lambda read: read.number)
        if any(dtype in _literals(value) for value in values):
            return None
        for name in (name for value in values for name in _names(value)):
            read = self._stored(frame, in_call, name, dtype)
            if read is None and callers and name in arguments_of(frame.f_code):
                read = self._of_parameter(frame, name, dtype, callers)
            if read is not None:
                return read
        return None

    def _stored(self, frame: FrameType, seen: Sequence[_Read], name: str, dtype: torch.dtype) -> _Read | None:
        """Return the last read that was stored in `name`: by this call, or in this file if `name` is not local."""
        reads: Iterable[_Read] = seen
        if name not in frame.f_code.co_varnames and name not in frame.f_code.co_cellvars:
            file = frame.f_code.co_filename
            by_code = (by_byte for code, by_byte in self._reads.items() if code.co_filename == file)
            reads = (read for by_byte in by_code for read in by_byte.values() if read.origin.dtype == dtype)
        stored = (read for read in reads if _is_stored(read.code, read.at, name))
        return max(stored, key=lambda read: read.number, default=None)

    def _of_parameter(self, frame: FrameType, name: str, dtype: torch.dtype, callers: int) -> _Read | None:
        """Return the recorded read of the dtype that `frame` gets from its caller as the parameter `name`."""
        caller = next(_frames(frame.f_back), None)
        if caller is None:
            return None
        arguments = _arguments(caller.f_code, caller.f_lasti)
        by_name = [argument for argument in arguments if argument.arg == name]
        parameters = arguments_of(frame.f_code)
        position = parameters.index(name) - (parameters[0] in ("self", "cls"))
        plain = [argument for argument in arguments if argument.arg is None]
        sources = by_name or plain[position : position + 1]
        return self._in(caller, sources, dtype, callers - 1) if sources else None


def call_of(frame: FrameType) -> _Call:
    """Return the `_Call` that `frame` has as its trace function; set a new one if there is none."""
    if not isinstance(frame.f_trace, _Call):
        frame.f_trace = _Call(frame.f_trace)
    call: Any = frame.f_trace
    assert isinstance(call, _Call)
    return call


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the model's code, from `frame` outwards to the frame of the running module."""
    count = 0
    while frame is not None and count < _MOST_FRAMES:
        if frame.f_code is MODULE_CALL and count:
            return
        if not is_library(frame.f_code.co_filename):
            count += 1
            yield frame
        frame = frame.f_back


@lru_cache(maxsize=4096)
def position(code: CodeType, at: int) -> Span | None:
    """Return the source span of the instruction at byte `at`; None if it is unknown."""
    span = list(code.co_positions())[at // 2]
    line, last, column, end = span
    return None if None in span else (line, column, last, end)  # type: ignore[return-value]


def is_inside(span: Span | None, outer: Span) -> bool:
    return span is not None and outer[:2] <= span[:2] and span[2:] <= outer[2:]


@lru_cache(maxsize=4096)
def _arguments(code: CodeType, at: int) -> tuple[ast.keyword, ...]:
    """Return the arguments of the call at byte `at`, also positional ones; () without a call or its source."""
    span = position(code, at)
    if span is None:
        return ()
    line, column, last, end = span
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(line, last + 1)]
    if not all(lines):
        return ()
    lines[-1] = lines[-1][:end]
    lines[0] = b" " * column + lines[0][column:]
    try:
        tree = ast.parse(b"(\n" + b"".join(lines) + b"\n)", mode="eval")
    except SyntaxError:
        return ()  # the file differs from the running code
    call = ast.increment_lineno(tree, line - 2).body  # to the lines of the file
    if not isinstance(call, ast.Call):
        return ()
    return (*(ast.keyword(arg=None, value=value) for value in call.args), *call.keywords)


def span_of(node: ast.expr) -> Span:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _literals(node: ast.expr) -> Iterator[torch.dtype]:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "torch":
            dtype = getattr(torch, part.attr, None)
            if isinstance(dtype, torch.dtype):
                yield dtype


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the variables (`dtype`) and attributes of variables (`ctx.dtype`) in an expression."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield f"{node.value.id}.{node.attr}"
    else:
        for child in ast.iter_child_nodes(node):
            yield from _names(child)


def arguments_of(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@lru_cache(maxsize=1024)
def stores_in(code: CodeType) -> tuple[tuple[int, int, str], ...]:
    """Return (byte, line, name) of each instruction that stores a variable `name` or an attribute `variable.attribute`."""
    stores: list[tuple[int, int, str]] = []
    before: Any = None
    for instruction in dis.get_instructions(code):
        at, name, value = instruction.offset, instruction.opname, instruction.argval
        line = instruction.positions.lineno if instruction.positions is not None else None
        if line is not None and name == "STORE_ATTR":
            stores.append((at, line, f"{getattr(before, 'argval', '')}.{value}"))
        elif line is not None and name.startswith("STORE_") and value is not None:
            # Python 3.13 merges two stores into one instruction.
            names = value if isinstance(value, tuple) else (value,)
            stores += [(at, line, str(variable)) for variable in names]
        before = instruction
    return tuple(stores)


def _is_stored(code: CodeType, at: int, name: str) -> bool:
    """Return whether the code stores in the variable `name` the value that the instruction at byte `at` reads."""
    span = position(code, at)
    return span is not None and any(
        store > at and line <= span[0] and stored == name for store, line, stored in stores_in(code)
    )
