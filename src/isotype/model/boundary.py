"""Boundaries: casts around float32 modules of a 16-bit model, and around quantized layers.

A pinned norm, a trained embedding, a `modules_to_save` head or a trained bias would pass float32 to 16-bit
modules, or get errors from them. A boundary casts there: it swaps the module's class for a subclass (see
`isotype.compat.swapped`), and can be removed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from isotype.compat.swapped import Swapped, swap, swapped_class
from isotype.compat.torch import PARAMETERS, own_parameters, tree_map
from isotype.core.errors import PrecisionError


@dataclass(frozen=True)
class BoundarySettings:
    """Settings of a boundary.

    - `"float32"`: float inputs are cast to float32, autocast is off inside, float outputs are cast to
      `result`. For pinned parameters, and for norms and embeddings with float32 weights.
    - `"compute"`: the forward runs under autocast to `compute`, which casts weight, bias and input; float
      outputs are cast to `result`. For linear and other layers with float32 masters.
    - `"bias"`: the bias is added outside the 4-bit kernel, because bitsandbytes would round a trainable
      bias in place (`bias.data = bias.data.to(x.dtype)` in `Linear4bit.forward`).
    - `"int8"`: as `"bias"`, with the input cast to `compute` and reshaped to a matrix, as bitsandbytes'
      int8 kernels require.
    - `"scale"`: as `"compute"`, or as the quantized layer, on the input times 2^-exponent; the result is
      widened to `result`, multiplied by 2^exponent, and the bias is added.
    - `"residual"`: the forward runs under autocast to `compute`; the first float input and the outputs are
      cast to `result`. For embeddings and blocks, whose hidden states are the residual stream.
    - `"autocast"`: the forward runs under autocast to `compute`. For the model and modules outside of its
      blocks: a float32 residual stream needs autocast at every matmul, also in evaluation and generation.
    - `"inputs"`: float inputs are cast to `result`. For towers of pictures and sound: processors return
      float32, or the dtype of the family's author.

    Every kind keeps an 8-bit layer's row scales in copies of its weight (see `_init_8bit_state`).

    Attributes:
        kind: one of the above.
        compute: the compute dtype.
        result: dtype of float outputs; None for `compute`.
        exponent: of `"scale"`.
    """

    kind: str
    compute: torch.dtype
    result: torch.dtype | None = None
    exponent: int = 0

    @property
    def returns(self) -> torch.dtype:
        return self.result or self.compute


class Boundary(Swapped):
    """Marker of classes with a boundary; `boundary_settings` are its settings."""

    boundary_settings: BoundarySettings


def set_boundary(module: nn.Module, settings: BoundarySettings | None) -> bool:
    """Set, change or remove (None) the boundary of `module`; return whether it changed."""
    before = type(module)
    if hasattr(module, "set_reshard_after_forward"):
        # FSDP2's class wraps the module's class: nothing can be inserted below it.
        if boundary_of(module) != settings:
            what = f"{type(module).__name__}, which FSDP2 has sharded, under another policy"
            expected = "the policy that it was sharded under"
            fix = "isotype.enforce(model, policy) before it is sharded"
            raise PrecisionError.of("a sharded module cannot get another boundary", what, expected, fix)
        return False
    base: Any = original_class(module)
    cls = base if settings is None else _boundary_class(base, settings)
    if cls is before:
        return False
    swap(module, cls)
    return True


def boundary_of(module: nn.Module) -> BoundarySettings | None:
    return module.boundary_settings if isinstance(module, Boundary) else None


def original_class(module: nn.Module) -> type[nn.Module]:
    return module.original if isinstance(module, Boundary) else type(module)


def exponent_by_ranges(module: nn.Module) -> int | None:
    """Return the exponent of a boundary set for value ranges: of `"scale"`, 0 for float32; None for other modules."""
    settings = boundary_of(module)
    if settings is None:
        return None
    if settings.kind == "scale":
        return settings.exponent
    wide = (settings.kind == "compute" and settings.compute == torch.float32) or (
        settings.kind == "float32" and settings.result == torch.float32 != settings.compute
    )
    return 0 if wide else None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast_leaf(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast_leaf, value)


def _sharing(module: nn.Module, parameters: dict[str, Any]) -> Any:
    """Return a copy of the module with other `parameters` that shares all else; `module` is unchanged for threads."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, **{PARAMETERS: {**own_parameters(module), **parameters}})
    return twin


def _device_type(module: nn.Module) -> str:
    tensors = itertools.chain(module.parameters(), module.buffers())
    device = next((tensor.device.type for tensor in tensors), "cpu")
    return "cpu" if device == "meta" else device  # the meta device has no autocast


def _forward_float32(self: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _cast(args, torch.float32), _cast(kwargs, torch.float32)
    with torch.autocast(_device_type(self), enabled=False):
        return _cast(self.original.forward(self, *args, **kwargs), self.boundary_settings.returns)


def _forward_compute(self: Any, *args: Any, **kwargs: Any) -> Any:
    compute = self.boundary_settings.compute
    if compute == torch.float32:  # autocast does not cast to float32
        twin = _sharing(self, {name: _cast(own, compute) for name, own in self._parameters.items()})
        with torch.autocast(_device_type(self), enabled=False):
            return self.original.forward(twin, *_cast(args, compute), **_cast(kwargs, compute))
    with torch.autocast(_device_type(self), dtype=compute):
        return _cast(self.original.forward(self, *args, **kwargs), self.boundary_settings.returns)


def _forward_bias(self: Any, x: torch.Tensor) -> torch.Tensor:
    bias = self.bias
    if bias is None or bias.dtype == self.boundary_settings.compute:
        return cast("torch.Tensor", self.original.forward(self, x))
    twin = _sharing(self, {"bias": None})
    out = self.original.forward(twin, x)
    return cast("torch.Tensor", out + bias.to(out.dtype))


def _with_codes(self: Any) -> Any:
    """Return an 8-bit layer with codes where bitsandbytes expects them: FSDP2 gathers them into a plain parameter."""
    if hasattr(self.weight, "CB"):
        return self
    from bitsandbytes.nn import Int8Params

    self.state.CB = self.weight.data
    return _sharing(self, {"weight": Int8Params(self.weight.data, requires_grad=False)})


def _forward_int8(self: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.to(self.boundary_settings.compute).reshape(-1, x.shape[-1])
    # Autocast would apply to the float32 matmul that emulates an int8 one on a CPU without AVX512
    # (bitsandbytes 0.50.2, backends/default/ops.py): sums of int8 products overflow in float16 and lose
    # digits in bfloat16.
    with torch.autocast(_device_type(self), enabled=False):
        out = _forward_bias(_with_codes(self), rows).reshape(*x.shape[:-1], -1)
    return cast("torch.Tensor", _cast(out, self.boundary_settings.returns))


def _forward_scale(self: Any, x: torch.Tensor) -> torch.Tensor:
    compute, factor = self.boundary_settings.compute, 2.0**self.boundary_settings.exponent
    bias = self.bias
    layer = _with_codes(self) if hasattr(self, "init_8bit_state") else self
    layer = layer if bias is None else _sharing(layer, {"bias": None})
    low = (x.float() / factor).to(compute)  # exact except for subnormal numbers
    if hasattr(self, "init_8bit_state"):
        with torch.autocast(_device_type(self), enabled=False):
            out = self.original.forward(layer, low.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
    else:
        with torch.autocast(_device_type(self), dtype=compute):
            out = self.original.forward(layer, low)
    out = out.to(self.boundary_settings.returns) * factor
    return cast("torch.Tensor", out if bias is None else out + bias.to(out.dtype))


def _forward_residual(self: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = self.boundary_settings.returns
    place = next((i for i, value in enumerate(args) if _is_float(value)), None)
    if place is not None:
        args = (*args[:place], args[place].to(dtype), *args[place + 1 :])
    elif _is_float(kwargs.get("hidden_states")):
        kwargs = {**kwargs, "hidden_states": kwargs["hidden_states"].to(dtype)}
    with torch.autocast(_device_type(self), dtype=self.boundary_settings.compute):
        out = self.original.forward(self, *args, **kwargs)
    if isinstance(out, tuple) and out and _is_float(out[0]):
        return (out[0].to(dtype), *out[1:])
    return out.to(dtype) if _is_float(out) else out


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _forward_autocast(self: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(_device_type(self), dtype=self.boundary_settings.compute):
        return self.original.forward(self, *args, **kwargs)


def _forward_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = self.boundary_settings.returns
    return self.original.forward(self, *_cast(args, dtype), **_cast(kwargs, dtype))


def _init_8bit_state(self: Any) -> None:
    # Copies of an Int8Params by `Module.to` or PEFT's DoRA lack the row scales once they have moved to
    # `state`, and bitsandbytes 0.50.2 would then overwrite the scales by None.
    scales = self.state.SCB if self.weight.SCB is None else self.weight.SCB
    self.original.init_8bit_state(self)
    self.state.SCB = None if scales is None else scales.to(self.weight.device)


_FORWARDS: dict[str, Callable[..., Any]] = {
    "float32": _forward_float32,
    "compute": _forward_compute,
    "bias": _forward_bias,
    "int8": _forward_int8,
    "scale": _forward_scale,
    "residual": _forward_residual,
    "autocast": _forward_autocast,
    "inputs": _forward_inputs,
}


@cache
def _boundary_class(base: Any, settings: BoundarySettings) -> Any:
    members = {"forward": _FORWARDS[settings.kind]}
    if hasattr(base, "init_8bit_state"):
        members["init_8bit_state"] = _init_8bit_state
    made_by = (_boundary_class, (base, settings))
    return swapped_class(Boundary, made_by, base, members, boundary_settings=settings)
