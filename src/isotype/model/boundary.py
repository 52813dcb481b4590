"""Boundaries cast the inputs and outputs of quantized layers, and of float32 modules in a 16-bit model.

Without a boundary, a float32 module would pass float32 tensors to 16-bit modules, or raise an error for 16-bit inputs.
Examples of float32 modules are a pinned norm, a trained embedding, a `modules_to_save` head, and a layer with a trained
bias. To set a boundary, isotype replaces the class of the module by a subclass (see `isotype.compat.swapped`).
"""

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
    """The kind of a boundary, and the dtypes to which the boundary casts inputs and outputs of a module.

    - `"float32"`: for pinned parameters, and for norms and embeddings with float32 weights. The module runs without
      autocast. Float inputs are cast to float32, and float outputs to `result`.
    - `"compute"`: for linear and other layers with float32 masters. Autocast to `compute` casts weight, bias and input.
      Float outputs are cast to `result`.
    - `"bias"`: for 4-bit layers with a float32 bias. The boundary adds the bias after the layer, because bitsandbytes
      would round a trainable bias in place (`bias.data = bias.data.to(x.dtype)` in `Linear4bit.forward`).
    - `"int8"`: for 8-bit layers. The boundary adds the bias after the layer, casts the input to `compute`, and reshapes the
      input to a matrix, because bitsandbytes' int8 kernels require a matrix.
    - `"scale"`: for linear layers whose values exceed float16's range. The boundary multiplies the input by
      2^-exponent. The layer multiplies the scaled input by the weight in `compute`. The boundary casts the product to
      `result`, multiplies it by 2^exponent, and adds the bias.
    - `"residual"`: for embeddings and blocks, whose hidden states are the residual stream. The forward runs under
      autocast to `compute`. The first float input and all float outputs are cast to `result`.
    - `"autocast"`: for the whole model, and for modules outside of the blocks. The forward runs under autocast to
      `compute`, also in evaluation and generation, because every matmul needs autocast if the residual stream is float32.
    - `"inputs"`: for towers of images or audio. Float inputs have the processor's dtype, and are cast to `result`.
    - `"merger"`: for the module that puts image features among the embeddings. Its attribute `dtype` is `result`, the dtype
      of the embeddings. SmolVLM casts image features to `self.dtype`, which is the dtype of the first parameter by default.

    bitsandbytes loses the row scales of a copied 8-bit weight. A boundary of any kind keeps them (`_init_8bit_state`).

    Attributes:
        result: dtype of float outputs; None means `compute`.
        exponent: the kind `"scale"` multiplies by 2 to the power of this number; 0 for other kinds.
    """

    kind: str
    compute: torch.dtype
    result: torch.dtype | None = None
    exponent: int = 0

    @property
    def returns(self) -> torch.dtype:
        return self.result or self.compute


class Boundary(Swapped):
    """Base class of modules with a boundary."""

    boundary_settings: BoundarySettings


def set_boundary(module: nn.Module, settings: BoundarySettings | None) -> bool:
    """Set a module's boundary; None removes it. Return True if this changed the module."""
    if hasattr(module, "set_reshard_after_forward"):
        # FSDP2's class is a subclass of the module's class. Nothing can be put between the two.
        if boundary_of(module) != settings:
            what = f"another policy for {type(module).__name__}, which FSDP2 has sharded"
            expected = "the policy that the module had when it was sharded"
            fix = "isotype.enforce(model, policy) before fully_shard"
            raise PrecisionError.of("the policy of a sharded module cannot change", what, expected, fix)
        return False
    base: Any = original_class(module)
    cls = base if settings is None else _boundary_class(base, settings)
    if cls is type(module):
        return False
    swap(module, cls)
    return True


def boundary_of(module: nn.Module) -> BoundarySettings | None:
    return module.boundary_settings if isinstance(module, Boundary) else None


def original_class(module: nn.Module) -> type[nn.Module]:
    return module.original if isinstance(module, Boundary) else type(module)


def exponent_by_ranges(module: nn.Module) -> int | None:
    """Return the exponent of a `"scale"` boundary, or 0 for a module that is in float32 because of value ranges; else None."""
    match boundary_of(module):
        case BoundarySettings("scale", exponent=exponent):
            return exponent
        case BoundarySettings("compute", torch.float32):
            return 0
        case BoundarySettings("float32", compute, torch.float32) if compute != torch.float32:
            return 0
    return None


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a nested structure with all float tensors cast to `dtype`."""
    return tree_map(lambda leaf: leaf.to(dtype) if _is_float(leaf) else leaf, value)


def sharing(module: nn.Module, parameters: dict[str, Any]) -> Any:
    """Return a shallow copy of `module` with other `parameters`. For other threads, `module` itself stays the same."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, **{PARAMETERS: {**own_parameters(module), **parameters}})
    return twin


def _device_type(module: nn.Module) -> str:
    tensors = itertools.chain(module.parameters(), module.buffers())
    device = next((tensor.device.type for tensor in tensors), "cpu")
    return "cpu" if device == "meta" else device  # the meta device has no autocast


def _forward_float32(self: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)
    with torch.autocast(_device_type(self), enabled=False):
        return cast_floats(self.original.forward(self, *args, **kwargs), self.boundary_settings.returns)


def _forward_compute(self: Any, *args: Any, **kwargs: Any) -> Any:
    compute, forward = self.boundary_settings.compute, getattr(self.original, "reduce", self.original.forward)
    if compute == torch.float32:  # autocast does not cast to float32
        twin = sharing(self, cast_floats(own_parameters(self), compute))
        with torch.autocast(_device_type(self), enabled=False):
            return forward(twin, *cast_floats(args, compute), **cast_floats(kwargs, compute))
    with torch.autocast(_device_type(self), dtype=compute):
        return cast_floats(forward(self, *args, **kwargs), self.boundary_settings.returns)


def _forward_bias(self: Any, x: torch.Tensor) -> torch.Tensor:
    bias = self.bias
    if bias is None or bias.dtype == self.boundary_settings.compute:
        return cast("torch.Tensor", self.original.forward(self, x))
    out = self.original.forward(sharing(self, {"bias": None}), x)
    return cast("torch.Tensor", out + bias.to(out.dtype))


def _with_codes(self: Any) -> Any:
    """Return an 8-bit layer whose weight is an `Int8Params`. This is needed because FSDP2 turns the weight into a plain parameter."""
    if hasattr(self.weight, "CB"):
        return self
    from bitsandbytes.nn import Int8Params

    self.state.CB = self.weight.data
    return sharing(self, {"weight": Int8Params(self.weight.data, requires_grad=False)})


def _forward_int8(self: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.to(self.boundary_settings.compute).reshape(-1, x.shape[-1])
    # Without AVX512, a CPU emulates the int8 matmul by a float32 matmul (bitsandbytes 0.50.2, backends/default/ops.py).
    # Autocast would compute it in 16 bits: sums of int8 products overflow in float16, and lose digits in bfloat16.
    with torch.autocast(_device_type(self), enabled=False):
        out = _forward_bias(_with_codes(self), rows)
    return out.reshape(*x.shape[:-1], out.shape[-1]).to(self.boundary_settings.returns)


def _forward_scale(self: Any, x: torch.Tensor) -> torch.Tensor:
    compute, factor = self.boundary_settings.compute, 2.0**self.boundary_settings.exponent
    bias, eight = self.bias, hasattr(self, "init_8bit_state")
    layer = _with_codes(self) if eight else self
    layer = layer if bias is None else sharing(layer, {"bias": None})
    low = (x.float() / factor).to(compute).reshape(-1, x.shape[-1])  # exact except for subnormal numbers
    with torch.autocast(_device_type(self), dtype=compute, enabled=not eight):
        out = self.original.forward(layer, low)
    out = out.reshape(*x.shape[:-1], out.shape[-1]).to(self.boundary_settings.returns) * factor
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
    return self.original.forward(self, *cast_floats(args, dtype), **cast_floats(kwargs, dtype))


def _init_8bit_state(self: Any) -> None:
    # bitsandbytes moves an Int8Params' row scales to `state`. A later copy of the weight (`Module.to`, PEFT's DoRA) has
    # no scales, and bitsandbytes 0.50.2 would overwrite those in `state` by None.
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
    # JetMoeMoA has no forward. It adds its bias in `reduce`.
    name = "reduce" if settings.kind == "compute" and hasattr(base, "reduce") else "forward"
    members = {name: _FORWARDS[settings.kind]} if settings.kind in _FORWARDS else {}
    if hasattr(base, "init_8bit_state"):
        members["init_8bit_state"] = _init_8bit_state
    attributes = {"dtype": settings.returns} if settings.kind == "merger" else {}
    made_by = (_boundary_class, (base, settings))
    return swapped_class(Boundary, made_by, base, members, boundary_settings=settings, **attributes)
