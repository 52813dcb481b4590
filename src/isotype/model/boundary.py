"""Boundaries: modules whose own weights are float32 in a model that computes in 16 bits.

A pinned norm, an unfrozen embedding, a `modules_to_save` head, a trained bias: each would send float32 into
16-bit neighbours, or be refused by them. A boundary casts at that one place. It swaps the module's class for a
subclass of it (as `torch.nn.utils.parametrize` and FSDP2 do), so names, `isinstance`, `deepcopy` and pickle
keep working, and it can be taken away again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map


class Boundary:
    """Marks the classes made here; `original` is the module's own class.

    Attributes:
        original: the class before the swap.
        boundary: `"float32"`, `"compute"` or `"bias"`, see `set_boundary`.
    """

    original: type[nn.Module]
    boundary: str

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.original, self.boundary), cast(nn.Module, self).__dict__


def set_boundary(module: nn.Module, boundary: str | None, compute: torch.dtype) -> bool:
    """Give `module` a boundary of the kind named, change it, or take it away (None). Returns whether it changed.

    - `"float32"`: float inputs are cast to float32, autocast is off inside, float outputs return in `compute`.
      For pinned parameters and for norms and embeddings with float32 weights.
    - `"compute"`: the forward runs under autocast to `compute`, which casts weight, bias and input together.
      For linear layers with float32 masters.
    - `"bias"`: the bias is added outside the quantized kernel: bitsandbytes would otherwise round a trainable
      bias in place (`bias.data = bias.data.to(x.dtype)` in `Linear4bit.forward`).
    """
    current = module.boundary if isinstance(module, Boundary) else None
    if boundary is not None:
        module.__dict__["_boundary_compute"] = compute
    if current == boundary:
        return False
    base = original_class(module)
    module.__class__ = base if boundary is None else _boundary_class(base, boundary)
    if boundary is None:
        module.__dict__.pop("_boundary_compute", None)
    return True


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without a boundary."""
    return module.original if isinstance(module, Boundary) else type(module)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast_leaf(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast_leaf, value)


def _device_type(module: nn.Module) -> str:
    return next(module.parameters(recurse=False)).device.type


def _forward_float32(self: Any, *args: Any, **kwargs: Any) -> Any:
    compute = self._boundary_compute
    args, kwargs = _cast(args, torch.float32), _cast(kwargs, torch.float32)
    with torch.autocast(_device_type(self), enabled=False):
        return _cast(self.original.forward(self, *args, **kwargs), compute)


def _forward_compute(self: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(_device_type(self), dtype=self._boundary_compute):
        return self.original.forward(self, *args, **kwargs)


def _forward_bias(self: Any, x: torch.Tensor) -> torch.Tensor:
    bias, self._parameters["bias"] = self._parameters["bias"], None
    try:
        out = self.original.forward(self, x)
    finally:
        self._parameters["bias"] = bias
    return cast(torch.Tensor, out + bias.to(out.dtype))


_FORWARDS: dict[str, Callable[..., Any]] = {
    "float32": _forward_float32,
    "compute": _forward_compute,
    "bias": _forward_bias,
}


@cache
def _boundary_class(base: type[nn.Module], boundary: str) -> type[nn.Module]:
    members = {
        "original": base,
        "boundary": boundary,
        "forward": _FORWARDS[boundary],
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return cast(type[nn.Module], type(base.__name__, (Boundary, base), members))


def _rebuild(base: type[nn.Module], boundary: str) -> nn.Module:
    cls = _boundary_class(base, boundary)
    return cast(nn.Module, cls.__new__(cls))
