"""PEFT's LoRA layers with their products in one function: what a call computes, and which layers cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from isotype.core.dtypes import autocast_dtype
from isotype.lora.gates import Gate
from isotype.lora.linear import Adapter, Layer, Spec, lora_linear
from isotype.lora.loops.products import is_used
from isotype.lora.weights import DenseWeights
from isotype.model.boundary import boundary_of
from isotype.model.quantized import quantization_state, row_scales
from isotype.model.shard import is_sharded
from isotype.model.walk import LINEAR_KINDS, kind_of
from isotype.precision.devices.cpu import this_cpu, this_onednn, why_not_native


@dataclass(frozen=True)
class GatedInput:
    """What a gated MLP hands to its last layer in the place of `gate.product(first, second)`."""

    gate: Gate
    first: torch.Tensor
    second: torch.Tensor


def why_not(layer: Any) -> str | None:
    """Why a PEFT layer is left on PEFT's own path under its active adapters, as a clause; None where it is fused."""
    base = layer.get_base_layer()
    kind = kind_of(base)
    weight = getattr(base, "weight", None)
    if kind not in LINEAR_KINDS or weight is None or weight.dim() != 2:
        return f"its base is {type(base).__name__}, not a linear layer"
    if weight.requires_grad:
        return "its base weight is trained"
    if kind == "linear4bit" and quantization_state(base) is None:
        return "its base has lost its quantization state"
    if kind == "linear8bit" and row_scales(base) is None:
        return "its base has lost its row scales"
    settings = boundary_of(base)
    if settings is not None and settings.kind not in ("bias", "int8"):
        return f"its base computes in its own dtype (boundary {settings.kind!r})"
    return _why_not_adapters(layer)


def _why_not_adapters(layer: Any) -> str | None:
    names = _active(layer)
    for name in names:
        variant = layer.lora_variant.get(name)
        dora = variant is not None and name in layer.lora_magnitude_vector
        if variant is not None and not (dora and type(variant).__name__ == "DoraLinearVariant"):
            return f"adapter {name!r} is a {type(variant).__name__}"
        for part in (layer.lora_A[name], layer.lora_B[name]):
            if kind_of(part) != "linear" or boundary_of(part) or part.weight.dim() != 2:
                return f"adapter {name!r} is not of plain linear layers"
        if dora and len(names) > 1:
            return "it has DoRA beside other adapters"
        if dora and layer.lora_B[name].bias is not None:
            return "it has DoRA with lora_bias"
        if dora and layer.training and _dropout(layer, name):
            return "it has DoRA with dropout"
    return None


def _active(layer: Any) -> list[str]:
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]


def _dropout(layer: Any, name: str) -> float:
    module = layer.lora_dropout[name]
    return float(module.p) if module.training and isinstance(module, nn.Dropout) else 0.0


def _reached(layer: nn.Module) -> bool:
    """Whether only PEFT's own path will do for what is inside of the layer, just now.

    It calls the parts, on which somebody has put hooks, and gathers weights of which a rank holds a part only, as between the
    steps of FSDP2.
    """
    parts = [layer]  # asked for every product: `modules()` takes three times as long
    for part in parts:
        state = part.__dict__
        if part is not layer and (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or "_hf_hook" in state
        ):
            return True
        for parameter in state["_parameters"].values():
            if parameter is not None and is_sharded(parameter):
                return True
        parts += [child for child in state["_modules"].values() if child is not None]
    return False


def _layer(layer: Any) -> tuple[Layer, list[torch.Tensor]]:
    """A PEFT layer as data, and its tensors in the order that `lora_linear` takes."""
    base, names = layer.get_base_layer(), _active(layer)
    biases = [(1.0, base.bias)] + [(layer.scaling[name], layer.lora_B[name].bias) for name in names]
    biases = [(scale, bias) for scale, bias in biases if bias is not None]
    adapters, tensors = [], [bias for _, bias in biases]
    for name in names:
        dora = name in layer.lora_variant
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        adapters.append(Adapter(down.shape[0], layer.scaling[name], _dropout(layer, name), dora))
        tensors += [down, up]
        if dora:
            tensors.append(layer.lora_magnitude_vector[name].weight)
    return Layer(base, tuple(scale for scale, _ in biases), tuple(adapters)), tensors


def _dtypes(base: Any, x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    """(compute dtype, dtype of the result), as the base layer itself would have them."""
    kind, device = kind_of(base), x.device.type
    low, settings = autocast_dtype(device), boundary_of(base)
    if settings is not None and settings.kind == "int8":
        return low or settings.compute, settings.returns
    if low is not None:
        return low, low
    if kind == "linear4bit":
        return base.compute_dtype or x.dtype, x.dtype
    if kind == "linear8bit":
        return (x.dtype if x.dtype.itemsize == 2 else torch.float16), x.dtype
    return base.weight.dtype, base.weight.dtype


def working_dtype(compute: torch.dtype, x: torch.Tensor) -> torch.dtype:
    """The dtype that products run in: `compute`, or float32 on a CPU that emulates it, many times slower.

    A product of 16-bit numbers that is summed in float32 and rounded once is what the slow kernels give, too.
    """
    slow = x.device.type == "cpu" and not isinstance(x, FakeTensor) and _emulated(compute)
    return torch.float32 if slow else compute


@cache
def _emulated(dtype: torch.dtype) -> bool:
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    return why_not_native(dtype, str(dtype), this_cpu(), this_onednn()) is not None


class Siblings:
    """Layers of one module that are called one after another with the very same tensor, and so run as one.

    The first that is called computes the outputs of all; the others fetch theirs. A layer that is called with another
    tensor after all, or with the same one when it has been written into, computes its own output.
    """

    def __init__(self, weights: DenseWeights, layers: Sequence[Any]) -> None:
        self.__setstate__({"weights": weights, "layers": tuple(layers)})

    def __getstate__(self) -> dict[str, Any]:
        # What waits to be fetched belongs to a running forward.
        return {"weights": self.weights, "layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.weights: DenseWeights = state["weights"]
        self.layers: tuple[Any, ...] = state["layers"]
        self._local = threading.local()

    def output(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """The output of one of the layers for X; None where it takes PEFT's own path just now."""
        ready: _Ready | None = getattr(self._local, "ready", None)
        if ready is not None and ready.fits(x) and layer in ready.outputs:
            made = ready.outputs.pop(layer)
            if not ready.outputs:
                self._local.ready = None
            return made
        leads = layer is self.layers[0]
        outputs = _together(self.weights, self.layers if leads else (layer,), x)
        if outputs is None:
            return None
        made = outputs.pop(layer)
        if leads:
            self._local.ready = _Ready(x, _version(x), _modes(x), outputs) if outputs else None
        return made


@dataclass
class _Ready:
    """Outputs that wait to be fetched for the tensor they were computed from."""

    x: torch.Tensor
    version: int
    modes: tuple[Any, ...]
    outputs: dict[nn.Module, torch.Tensor]

    def fits(self, x: torch.Tensor) -> bool:
        return self.x is x and self.version == _version(x) and self.modes == _modes(x)


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _modes(x: torch.Tensor) -> tuple[Any, ...]:
    device = x.device.type
    return torch.is_grad_enabled(), autocast_dtype(device)


def _together(
    weights: DenseWeights, layers: Sequence[Any], x: torch.Tensor
) -> dict[nn.Module, torch.Tensor] | None:
    """Outputs for X of the first layer and of those of the others that compute in the same dtypes."""
    usable = [layer for layer in layers if not _own_path(layer)]
    if not usable or usable[0] is not layers[0]:
        return None
    dtypes = _dtypes(layers[0].get_base_layer(), x)
    usable = [layer for layer in usable if _dtypes(layer.get_base_layer(), x) == dtypes]
    outputs = _run(weights, usable, (x,), dtypes)
    return dict(zip(usable, outputs, strict=True))


def _run(
    weights: DenseWeights,
    layers: Sequence[Any],
    inputs: tuple[torch.Tensor, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    gate: Gate | None = None,
) -> tuple[torch.Tensor, ...]:
    specs, tensors = zip(*(_layer(layer) for layer in layers), strict=True)
    compute, result = dtypes
    working, flat = working_dtype(compute, inputs[0]), [tensor for own in tensors for tensor in own]
    compiled = is_used(working, inputs[0])
    spec = Spec(specs, weights, working, result, gate, torch.is_grad_enabled(), compiled)
    return lora_linear(spec, inputs, flat)


def gated_output(
    weights: DenseWeights, layer: Any, given: GatedInput, own_path: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """The output of a layer for a gated product that is not kept; `own_path` is PEFT's forward of it."""
    if _own_path(layer):
        return own_path(layer, given.gate.product(given.first, given.second))
    dtypes = _dtypes(layer.get_base_layer(), given.first)
    return _run(weights, (layer,), (given.first, given.second), dtypes, given.gate)[0]


def _own_path(layer: Any) -> bool:
    """Whether a layer runs as PEFT runs it, just now."""
    return bool(layer.merged or _reached(layer) or why_not(layer) is not None)
