"""What this room's compiled sources share on Python's side: how they are loaded, and torch's operators for their loops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from isotype.core.compiled import NotCompiledError, load_compiled
from isotype.precision.devices.cpu import compiler_options

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""What the loops of a dtype are called: `forward_float32`."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose memory the loops read: a subclass may mean something else by its own."""

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Loops:
    """What was compiled of a source for this CPU.

    Attributes:
        reason: why there is nothing, as a clause; None where there is.
        library: the functions.
    """

    reason: str | None
    library: ctypes.CDLL | None = None

    def has(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a loop was compiled for a dtype."""
        return dtype in NAMES and hasattr(self.library, f"{name}_{NAMES[dtype]}")

    def run(self, name: str, dtype: torch.dtype, *given: Any) -> None:
        """Call a loop: tensors as their addresses, int as int64, float as float, anything else as a pointer."""
        function: Any = getattr(self.library, f"{name}_{NAMES[dtype]}")
        if function.argtypes is None:
            function.restype, function.argtypes = None, _types_of(given)
        function(*[x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given])


@cache
def loops_of(source: Path, *headers: Path) -> Loops:
    """The compiled loops of a source; compiling takes some seconds, once on a machine."""
    try:
        return Loops(None, load_compiled(source, compiler_options(), headers))
    except NotCompiledError as error:
        return Loops(str(error))


# As operators of torch's the loops are seen by everything that watches operators: the search for the first value that is not
# finite names them.
_LIBRARY: Any = torch.library.Library("isotype", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(
    schema: str, keys: Sequence[str] = ("CPU",), fake: Callable[..., Any] | None = None
) -> Callable[[Callable[_Given, _Made]], Callable[_Given, _Made]]:
    """Let a function be the operator `isotype::…` of a schema; it has no derivatives.

    Where nobody watches operators, the function itself is called: the way through torch takes longer than some loops.

    Args:
        schema: name, arguments and results.
        keys: dispatch keys of the devices that it computes on.
        fake: what it returns of fake tensors, which have shapes and dtypes alone.
    """

    def defined(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        for key in keys:
            _LIBRARY.impl(name, function, key)
        if fake is not None:
            torch.library.register_fake(f"isotype::{name}", fake, lib=_LIBRARY)
        watched: Any = getattr(torch.ops.isotype, name).default

        @wraps(function)
        def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
            seen = torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled()
            made: _Made = (watched if seen else function)(*args, **kwargs)
            return made

        return called

    return defined


def _types_of(given: Sequence[Any]) -> list[Any]:
    types = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_float}
    return [types.get(type(x), ctypes.c_void_p) for x in given]
