"""What is measured of a tensor's values, whatever kind of tensor it is."""

from __future__ import annotations

from typing import Any

import torch

from isotype.compat.torch import is_traceable_wrapper_subclass
from isotype.records.nonfinite import Value


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """The dense float values that lie here, as float32 where no kernel looks at the dtype; None where there are none.

    Of a sharded tensor it is this process's part; what a tensor subclass keeps in its own way cannot be read.
    """
    held: Any = tensor
    if hasattr(held, "to_local"):
        held = held.to_local()
    if not held.is_floating_point() or held.is_meta or held.layout is not torch.strided:
        return None
    if is_traceable_wrapper_subclass(held) or not held.numel():
        return None
    values: torch.Tensor = held.detach()
    return values.to(torch.float32) if values.dtype.itemsize == 1 else values


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element that can be read is a number."""
    values = readable(tensor)
    if values is None:
        return True
    least, most = torch.aminmax(values)  # one pass, nothing allocated; NaN comes through
    return bool(torch.isfinite(least) & torch.isfinite(most))


def value_of(role: str, tensor: torch.Tensor, name: str = "") -> Value:
    """Dtype, shape and magnitudes of a tensor."""
    values, shape = readable(tensor), tuple(tensor.shape)
    if values is None:
        return Value(role, tensor.dtype, shape, 0.0, 0, 0, name)
    nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    finite = values[values.isfinite()] if nan or infinite else values
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return Value(role, tensor.dtype, shape, largest, nan, infinite, name)
