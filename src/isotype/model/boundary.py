"""Boundaries: modules whose own weights are float32 in a model that computes in 16 bits, and quantized layers.

A pinned norm, an unfrozen embedding, a `modules_to_save` head, a trained bias: each would send float32 into
16-bit neighbours, or be refused by them. A boundary casts at that one place. It swaps the module's class for a
subclass of it (as `torch.nn.utils.parametrize` and FSDP2 do), so names, `isinstance`, `deepcopy` and pickle
keep working, and it can be taken away again.
"""

from __future__ import annotations

import types
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
        boundary: the boundary's kind, see `set_boundary`.
    """

    original: type[nn.Module]
    boundary: str

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The state as the module's own class gives it: recurrent layers leave weak references out.
        return _rebuild, (self.original, self.boundary), self.__getstate__()


def set_boundary(module: nn.Module, boundary: str | None, compute: torch.dtype) -> bool:
    """Give `module` a boundary of the kind named, change it, or take it away (None). Returns whether it changed.

    - `"float32"`: float inputs are cast to float32, autocast is off inside, float outputs return in `compute`.
      For pinned parameters and for norms and embeddings with float32 weights.
    - `"compute"`: the forward runs under autocast to `compute`, which casts weight, bias and input together;
      float outputs return in `compute`. For linear layers and others with float32 masters.
    - `"bias"`: the bias is added outside the 4-bit kernel: bitsandbytes would otherwise round a trainable bias in
      place (`bias.data = bias.data.to(x.dtype)` in `Linear4bit.forward`).
    - `"int8"`: as `"bias"`, and the input comes in `compute` and as a matrix, which is all that bitsandbytes'
      int8 kernels take; the row scales survive a copy of the weight (see `_init_8bit_state`).
    """
    before = (type(module), module.__dict__.get("_boundary_compute"))
    base: Any = original_class(module)
    module.__class__ = base if boundary is None else _boundary_class(base, boundary)
    if boundary is None:
        module.__dict__.pop("_boundary_compute", None)
    else:
        module.__dict__["_boundary_compute"] = compute
    if before == (type(module), module.__dict__.get("_boundary_compute")):
        return False
    for name in ("forward", "_old_forward"):  # accelerate's hooks keep the method that they call
        method = module.__dict__.get(name)
        if isinstance(method, types.MethodType) and method.__self__ is module:
            module.__dict__[name] = types.MethodType(type(module).forward, module)
    return True


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without a boundary."""
    return module.original if isinstance(module, Boundary) else type(module)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast_leaf(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast_leaf, value)


def _sharing(module: nn.Module, parameters: dict[str, Any]) -> Any:
    """The same module with other `parameters`, sharing all else: leaving `module` alone keeps threads apart."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, _parameters={**module._parameters, **parameters})
    return twin


def _device_type(module: nn.Module) -> str:
    return next(module.parameters(recurse=False)).device.type


def _forward_float32(self: Any, *args: Any, **kwargs: Any) -> Any:
    compute = self._boundary_compute
    args, kwargs = _cast(args, torch.float32), _cast(kwargs, torch.float32)
    with torch.autocast(_device_type(self), enabled=False):
        return _cast(self.original.forward(self, *args, **kwargs), compute)


def _forward_compute(self: Any, *args: Any, **kwargs: Any) -> Any:
    compute = self._boundary_compute
    if compute == torch.float32:  # which no autocast casts to
        twin = _sharing(self, {name: _cast(own, compute) for name, own in self._parameters.items()})
        with torch.autocast(_device_type(self), enabled=False):
            return self.original.forward(twin, *_cast(args, compute), **_cast(kwargs, compute))
    with torch.autocast(_device_type(self), dtype=compute):
        return _cast(self.original.forward(self, *args, **kwargs), compute)


def _forward_bias(self: Any, x: torch.Tensor) -> torch.Tensor:
    bias = self.bias
    if bias is None or bias.dtype == self._boundary_compute:
        return cast(torch.Tensor, self.original.forward(self, x))
    twin = _sharing(self, {"bias": None})
    out = self.original.forward(twin, x)
    return cast(torch.Tensor, out + bias.to(out.dtype))


def _forward_int8(self: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.to(self._boundary_compute).reshape(-1, x.shape[-1])
    # Autocast would reach the float32 matmul that stands for an int8 one on a CPU without AVX512 (bitsandbytes
    # 0.50.2, backends/default/ops.py): sums of int8 products overflow in float16 and lose digits in bfloat16.
    with torch.autocast(_device_type(self), enabled=False):
        return _forward_bias(self, rows).reshape(*x.shape[:-1], -1)


def _init_8bit_state(self: Any) -> None:
    # Every copy that `Module.to` or PEFT's DoRA makes of an Int8Params comes without its row scales once they have
    # moved to `state`, and bitsandbytes 0.50.2 would then overwrite the scales by None.
    scales = self.state.SCB if self.weight.SCB is None else self.weight.SCB
    self.original.init_8bit_state(self)
    self.state.SCB = None if scales is None else scales.to(self.weight.device)


_MEMBERS: dict[str, dict[str, Callable[..., Any]]] = {
    "float32": {"forward": _forward_float32},
    "compute": {"forward": _forward_compute},
    "bias": {"forward": _forward_bias},
    "int8": {"forward": _forward_int8, "init_8bit_state": _init_8bit_state},
}


@cache
def _boundary_class(base: Any, boundary: str) -> Any:
    members = {
        "original": base,
        "boundary": boundary,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        **_MEMBERS[boundary],
    }
    return type(base.__name__, (Boundary, base), members)


def _rebuild(base: Any, boundary: str) -> Any:
    cls = _boundary_class(base, boundary)
    return cls.__new__(cls)
