"""Boundaries: modules whose own weights are float32 in a model that computes in 16 bits, and quantized layers.

A pinned norm, an unfrozen embedding, a `modules_to_save` head, a trained bias: each would send float32 into
16-bit neighbours, or be refused by them. A boundary casts at that one place: it swaps the module's class for a
subclass of it (see `isotype.compat.swapped`), and can be taken away again.
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
    """A boundary.

    - `"float32"`: float inputs are cast to float32, autocast is off inside, float outputs return in `result`.
      For pinned parameters and for norms and embeddings with float32 weights.
    - `"compute"`: the forward runs under autocast to `compute`, which casts weight, bias and input together;
      float outputs return in `result`. For linear layers and others with float32 masters.
    - `"bias"`: the bias is added outside the 4-bit kernel: bitsandbytes would otherwise round a trainable bias in
      place (`bias.data = bias.data.to(x.dtype)` in `Linear4bit.forward`).
    - `"int8"`: as `"bias"`, and the input comes in `compute` and as a matrix, which is all that bitsandbytes'
      int8 kernels take.
    - `"scale"`: as `"compute"`, or as the quantized layer does it, of the input times 2^-exponent; the result is widened
      to `result`, multiplied by 2^exponent, and the bias is added to that.
    - `"residual"`: the forward runs under autocast to `compute`; the first float input and the outputs are cast to
      `result`. For embeddings and blocks, whose hidden states are the residual stream.
    - `"autocast"`: the forward runs under autocast to `compute`. For the whole model and for what lies outside of its
      blocks: a float32 residual stream needs autocast at every matmul, in evaluation and generation too.
    - `"inputs"`: float inputs are cast to `result`. For the towers of pictures and sound: processors return float32, or what the
      family's author computed in.

    Whatever the kind, an 8-bit layer's row scales survive a copy of its weight (see `_init_8bit_state`).

    Attributes:
        kind: one of the above.
        compute: the compute dtype.
        result: the dtype of float outputs; None for `compute`.
        exponent: of `"scale"`.
    """

    kind: str
    compute: torch.dtype
    result: torch.dtype | None = None
    exponent: int = 0

    @property
    def returns(self) -> torch.dtype:
        """The dtype of float outputs."""
        return self.result or self.compute


class Boundary(Swapped):
    """Marks the classes made here.

    Attributes:
        boundary_settings: what the boundary does.
    """

    boundary_settings: BoundarySettings


def set_boundary(module: nn.Module, settings: BoundarySettings | None) -> bool:
    """Give `module` a boundary, change it, or take it away (None). Returns whether it changed."""
    before = type(module)
    if hasattr(module, "set_reshard_after_forward"):
        # FSDP2's class lies over the module's own: nothing can be put under it any more.
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
    """Return the boundary that `module` has, or None."""
    return module.boundary_settings if isinstance(module, Boundary) else None


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class without a boundary."""
    return module.original if isinstance(module, Boundary) else type(module)


def exponent_by_ranges(module: nn.Module) -> int | None:
    """Of a module whose boundary value ranges ask for: the exponent of `"scale"`, 0 of float32; None of any other."""
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
    """The same module with other `parameters`, sharing all else: leaving `module` alone keeps threads apart."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, **{PARAMETERS: {**own_parameters(module), **parameters}})
    return twin


def _device_type(module: nn.Module) -> str:
    tensors = itertools.chain(module.parameters(), module.buffers())
    device = next((tensor.device.type for tensor in tensors), "cpu")
    return "cpu" if device == "meta" else device  # which has no autocast


def _forward_float32(self: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _cast(args, torch.float32), _cast(kwargs, torch.float32)
    with torch.autocast(_device_type(self), enabled=False):
        return _cast(self.original.forward(self, *args, **kwargs), self.boundary_settings.returns)


def _forward_compute(self: Any, *args: Any, **kwargs: Any) -> Any:
    compute = self.boundary_settings.compute
    if compute == torch.float32:  # which no autocast casts to
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
    """An 8-bit layer whose codes are where bitsandbytes looks for them: FSDP2 gathers them into a plain parameter before each forward."""
    if hasattr(self.weight, "CB"):
        return self
    from bitsandbytes.nn import Int8Params

    self.state.CB = self.weight.data
    return _sharing(self, {"weight": Int8Params(self.weight.data, requires_grad=False)})


def _forward_int8(self: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.to(self.boundary_settings.compute).reshape(-1, x.shape[-1])
    # Autocast would reach the float32 matmul that stands for an int8 one on a CPU without AVX512 (bitsandbytes
    # 0.50.2, backends/default/ops.py): sums of int8 products overflow in float16 and lose digits in bfloat16.
    with torch.autocast(_device_type(self), enabled=False):
        out = _forward_bias(_with_codes(self), rows).reshape(*x.shape[:-1], -1)
    return cast("torch.Tensor", _cast(out, self.boundary_settings.returns))


def _forward_scale(self: Any, x: torch.Tensor) -> torch.Tensor:
    compute, factor = self.boundary_settings.compute, 2.0**self.boundary_settings.exponent
    bias = self.bias
    layer = _with_codes(self) if hasattr(self, "init_8bit_state") else self
    layer = layer if bias is None else _sharing(layer, {"bias": None})
    low = (x.float() / factor).to(compute)  # exact but for subnormal numbers: only the exponent changes
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
    # Every copy that `Module.to` or PEFT's DoRA makes of an Int8Params comes without its row scales once they have
    # moved to `state`, and bitsandbytes 0.50.2 would then overwrite the scales by None.
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
