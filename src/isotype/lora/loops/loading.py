"""Loading of the compiled C++ loops."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isotype.core.compiled import NotCompiledError, load_compiled
from isotype.precision.devices.cpu import compiler_options

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Dtype -> suffix of a loop's name, as in `forward_float32`."""


@dataclass(frozen=True)
class Loops:
    """The compiled functions of a source for this CPU; `reason` is why there is no library, as a clause, or None."""

    reason: str | None
    library: ctypes.CDLL | None = None

    def has(self, name: str, dtype: torch.dtype) -> bool:
        return dtype in NAMES and hasattr(self.library, f"{name}_{NAMES[dtype]}")

    def run(self, name: str, dtype: torch.dtype, *arguments: Any) -> None:
        """Call the loop `name` for a dtype: it gets an int as int64, a Python float as a C float, and a tensor's address."""
        function: Any = getattr(self.library, f"{name}_{NAMES[dtype]}")
        if function.argtypes is None:
            types = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_float}
            function.restype = None
            function.argtypes = [types.get(type(x), ctypes.c_void_p) for x in arguments]
        function(*[x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments])


@cache
def loops_of(source: Path, *headers: Path) -> Loops:
    """Return the compiled loops of a C++ source, which are compiled once per machine, in some seconds."""
    try:
        return Loops(None, load_compiled(source, compiler_options(), headers))
    except NotCompiledError as error:
        return Loops(str(error))
