"""Loading of the compiled C++ loops."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isotype.core.compiled import NotCompiledError, load_compiled
from isotype.precision.devices.cpu import compiler_options

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Suffix of a loop's name by dtype, as in `forward_float32`."""


@dataclass(frozen=True)
class Loops:
    """The functions compiled from a C++ source for this CPU. If the functions could not be compiled, `reason` is a clause that says why."""

    reason: str | None
    library: ctypes.CDLL | None = None

    def has(self, name: str, dtype: torch.dtype) -> bool:
        return dtype in NAMES and hasattr(self.library, f"{name}_{NAMES[dtype]}")

    def run(self, name: str, dtype: torch.dtype, *arguments: Any) -> None:
        """Call the loop `name` for a dtype. Pass ints as int64, Python floats as C floats, and tensors as addresses."""
        function: Any = getattr(self.library, f"{name}_{NAMES[dtype]}")
        if function.argtypes is None:
            types = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_float}
            function.restype = None
            function.argtypes = [types.get(type(x), ctypes.c_void_p) for x in arguments]
        function(*[x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments])


def loops_of(source: Path, *headers: Path) -> Loops:
    """Return the loops of a C++ source. The first call on a machine compiles for some seconds."""
    try:
        return Loops(None, load_compiled(source, compiler_options(), headers))
    except NotCompiledError as error:
        return Loops(str(error))
