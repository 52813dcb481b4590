"""What this room's compiled sources share on Python's side: how they are loaded, and torch's operators for their loops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isotype.core.compiled import NotCompiledError, load_compiled
from isotype.precision.devices.cpu import compiler_options

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""What the loops of a dtype are called: `forward_float32`."""

OPS: Any = torch.ops.isotype


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
        """Call a loop: tensors as their addresses, int as int64, float as float, anything else as ctypes has it."""
        function = getattr(self.library, f"{name}_{NAMES[dtype]}")
        function.restype = None
        function(*map(_argument, given))


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


def operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function be the operator `isotype::…` of a schema on a CPU; it has no derivatives."""

    def defined(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(schema.partition("(")[0], function, "CPU")
        return function

    return defined


def _argument(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return ctypes.c_void_p(given.data_ptr())
    if isinstance(given, int):
        return ctypes.c_int64(given)
    return ctypes.c_float(given) if isinstance(given, float) else given
