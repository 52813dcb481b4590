"""Numbers that an operator writes into a tensor: whether the tensor's dtype reaches that far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isotype.core.operators import schema_of
from isotype.records.trace import FLOATS, Breach

# Operators that write a number into a tensor, with the arguments that it comes in: the number has to fit the tensor's
# dtype (`Scalar::to`, c10/core/Scalar.h).
_FILLS: Mapping[str, tuple[str, ...]] = {
    "aten.masked_fill.Scalar": ("value",),
    "aten.masked_fill_.Scalar": ("value",),
    "aten.fill.Scalar": ("value",),
    "aten.fill_.Scalar": ("value",),
    "aten.full.default": ("fill_value",),
    "aten.full_like.default": ("fill_value",),
    "aten.new_full.default": ("fill_value",),
    "aten.constant_pad_nd.default": ("value",),
    "aten.index_fill.int_Scalar": ("value",),
    "aten.index_fill_.int_Scalar": ("value",),
    "aten.scatter.value": ("value",),
    "aten.scatter_.value": ("value",),
}
# CUDA's kernels compare in float32 here, the CPU's in the tensor's own dtype.
_CPU_FILLS: Mapping[str, tuple[str, ...]] = {
    "aten.clamp.default": ("min", "max"),
    "aten.clamp_.default": ("min", "max"),
    "aten.clamp_min.default": ("min",),
    "aten.clamp_max.default": ("max",),
}


def numbers_of(name: str, kind: str) -> Sequence[str]:
    """The arguments of an operator on a kind of device whose numbers have to fit its tensor's dtype."""
    return _FILLS.get(name) or (_CPU_FILLS.get(name, ()) if kind == "cpu" else ())


def overflow(func: Any, args: Any, kwargs: Any, numbers: Sequence[str]) -> Breach | None:
    """The breach of writing a number into a tensor whose dtype cannot hold it."""
    arguments = dict(zip(schema_of(func).roles, args, strict=False)) | kwargs
    target = arguments.get("self")
    dtype = arguments.get("dtype") or (target.dtype if target is not None else torch.get_default_dtype())
    if dtype not in FLOATS:
        return None
    values = [float(arguments[name]) for name in numbers if isinstance(arguments.get(name), (int, float))]
    if all(not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max for value in values):
        return None
    spelled = {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.float32: "float"}
    message = f"value cannot be converted to type {spelled.get(dtype, dtype)} without overflow"
    return Breach(message, False, None)


def without_numbers(func: Any, args: Any, kwargs: Any, numbers: Sequence[str]) -> tuple[Any, Any]:
    """The arguments with zero for each number."""
    roles = schema_of(func).roles

    def zero(role: str, value: Any) -> Any:
        return 0.0 if role in numbers and value is not None else value

    args = tuple(zero(role, value) for role, value in zip(roles, args, strict=False))
    return args, {role: zero(role, value) for role, value in kwargs.items()}
