"""Fused modules: LoRA layers, gated MLPs, norms and attention with a swapped class.

LoRA layers with the same input run as one (`Siblings`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from isotype.compat.swapped import Swapped, swap, swapped_class
from isotype.compat.torch import FakeTensor, forward_hooks, forward_pre_hooks, is_transformed, version_of
from isotype.core.dtypes import autocast_dtype
from isotype.lora.adapted import Reading, read
from isotype.lora.gates import Gate, GatedParts
from isotype.lora.linear import lora_linear
from isotype.lora.loops.products import is_used
from isotype.lora.norms import NormParts, rms_norm
from isotype.lora.rotary import with_loops
from isotype.lora.spec import Spec
from isotype.lora.weights import DenseWeights
from isotype.model.boundary import boundary_of, set_boundary
from isotype.model.walk import kind_of, must_be_called
from isotype.precision.devices.simulated import simulates_cpu, working_dtype


@dataclass(frozen=True)
class GatedInput:
    """Input of a gated MLP's last layer in place of `gate.product(first, second)`."""

    gate: Gate
    first: torch.Tensor
    second: torch.Tensor


def _dtypes(base: Any, x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return (compute dtype, dtype of the result) of the base layer."""
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


def _by_loops(working: torch.dtype, x: torch.Tensor) -> bool:
    """Return whether the compiled loops multiply, which hold the weights of all layers in scratch at a time.

    For a simulated CPU this is unknown: the trace takes the path with more memory.
    """
    return simulates_cpu(x) if isinstance(x, FakeTensor) else is_used(working, x)


class Siblings:
    """Layers of one module that are called consecutively with the same tensor, and so run as one.

    The first call computes the outputs of all, the other calls fetch theirs. A layer called with another
    tensor, with a tensor modified since, or with one without a version counter (see `version_of`) computes
    its own output.
    """

    def __init__(self, weights: DenseWeights, layers: Sequence[Any]) -> None:
        self.__setstate__({"weights": weights, "layers": tuple(layers)})

    def __getstate__(self) -> dict[str, Any]:
        # Pending outputs belong to a running forward, readings to their layer.
        return {"weights": self.weights, "layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.weights: DenseWeights = state["weights"]
        self.layers: tuple[Any, ...] = state["layers"]
        self._local = threading.local()
        self._readings: dict[nn.Module, Reading] = {}

    def output(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """Return the output of one of the layers for X; None if it currently needs PEFT's path."""
        ready: _Ready | None = getattr(self._local, "ready", None)
        if ready is not None and ready.fits(x) and layer in ready.outputs:
            output = ready.outputs.pop(layer)
            if not ready.outputs:
                self._local.ready = None
            return output
        version = version_of(x)
        leads = layer is self.layers[0] and version is not None
        outputs = self._together(self.layers if leads else (layer,), x)
        if outputs is None:
            return None
        output = outputs.pop(layer)
        if leads:
            self._local.ready = _Ready(x, version, _modes(x), outputs) if outputs else None
        return output

    def gated_output(
        self, layer: Any, gate_input: GatedInput, own_path: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Return the output of a layer for a gated product that is not saved; `own_path` is PEFT's forward."""
        reading = self._read(layer, gate_input.first)
        if reading is None:
            return own_path(layer, gate_input.gate.product(gate_input.first, gate_input.second))
        inputs, dtypes = (gate_input.first, gate_input.second), _dtypes(reading.layer.base, gate_input.first)
        (output,) = _run(self.weights, (reading,), inputs, dtypes, gate_input.gate)
        return output

    def _together(self, layers: Sequence[Any], x: torch.Tensor) -> dict[nn.Module, torch.Tensor] | None:
        """Return the outputs for X of the first layer and of the others with the same dtypes."""
        first, *others = [self._read(layer, x) for layer in layers]
        if first is None:
            return None
        dtypes = _dtypes(first.layer.base, x)
        usable = {layers[0]: first}
        for layer, reading in zip(layers[1:], others, strict=True):
            if reading is not None and _dtypes(reading.layer.base, x) == dtypes:
                usable[layer] = reading
        outputs = _run(self.weights, tuple(usable.values()), (x,), dtypes)
        return dict(zip(usable, outputs, strict=True))

    def _read(self, layer: Any, x: torch.Tensor) -> Reading | None:
        """Return the reading of a layer for X; None if it currently needs PEFT's path."""
        former = self._readings.get(layer)
        reading = read(layer, former)
        if reading is None:
            self._readings.pop(layer, None)
        elif reading is not former:
            self._readings[layer] = reading
        return None if reading is None or reading.device != x.device else reading


@dataclass
class _Ready:
    """Outputs to be fetched for the tensor they were computed from."""

    x: torch.Tensor
    version: int | None
    modes: tuple[Any, ...]
    outputs: dict[nn.Module, torch.Tensor]

    def fits(self, x: torch.Tensor) -> bool:
        return self.x is x and self.version == version_of(x) and self.modes == _modes(x)


def _modes(x: torch.Tensor) -> tuple[Any, ...]:
    device = x.device.type
    return torch.is_grad_enabled(), autocast_dtype(device)


def _run(
    weights: DenseWeights,
    readings: Sequence[Reading],
    inputs: tuple[torch.Tensor, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    gate: Gate | None = None,
) -> tuple[torch.Tensor, ...]:
    layers = tuple([reading.layer for reading in readings])
    compute, result = dtypes
    working, tensors = working_dtype(compute, inputs[0]), [each for own in readings for each in own.tensors]
    compiled = _by_loops(working, inputs[0])
    spec = Spec(layers, weights, working, result, gate, torch.is_grad_enabled(), compiled)
    return lora_linear(spec, inputs, tensors)


class Fused(Swapped):
    """Marker of the created classes.

    Attributes:
        lora_state: names of additional attributes of a module of this class.
        lora_original: the class that was swapped. A boundary set later is on top, with its own
            `original`.
    """

    lora_state: tuple[str, ...] = ()
    lora_original: type[nn.Module]


class FusedLora(Fused):
    """A LoRA layer: `lora_weights` has the model's base weights, `lora_siblings` the layers that run with it."""

    lora_state = ("lora_weights", "lora_siblings")
    lora_weights: DenseWeights
    lora_siblings: Siblings


class FusedMlp(Fused):
    """A gated MLP that does not save its product; `lora_parts` are the names of its parts."""

    lora_state = ("lora_parts",)
    lora_parts: GatedParts


class FusedNorm(Fused):
    """An RMSNorm with the parameters `lora_norm`."""

    lora_state = ("lora_norm",)
    lora_norm: NormParts


class FusedRotary(Fused):
    """An attention layer that rotates queries and keys in one function."""


def _is_left_to_torch() -> bool:
    """Return whether a compiler or transform traces the code, which needs torch's operators."""
    return torch.compiler.is_compiling() or is_transformed()


def _forward_lora(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, GatedInput):
        return self.lora_siblings.gated_output(self, x, self.lora_original.forward)
    if not args and not kwargs and isinstance(x, torch.Tensor) and not _is_left_to_torch():
        made = self.lora_siblings.output(self, x)
        if made is not None:
            return made
    return self.lora_original.forward(self, x, *args, **kwargs)


# PEFT changes base weights by `.data`, which cannot be detected otherwise.
def _merge(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.lora_weights.forget(self.get_base_layer())
    return self.lora_original.merge(self, *args, **kwargs)


def _unmerge(self: Any) -> Any:
    self.lora_weights.forget(self.get_base_layer())
    return self.lora_original.unmerge(self)


def _forward_gated(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    parts: GatedParts = self.lora_parts
    down = self._modules[parts.down]
    hooked = must_be_called(forward_hooks(down)) or must_be_called(forward_pre_hooks(down))
    if args or kwargs or hooked or _is_left_to_torch() or not isinstance(down, FusedLora):
        return self.lora_original.forward(self, x, *args, **kwargs)
    outputs = {name: self._modules[name](x) for name in parts.order}
    return down(GatedInput(parts.gate, outputs[parts.first], outputs[parts.second]))  # type: ignore[operator]


def _forward_norm(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or _is_left_to_torch() or not x.is_floating_point():
        return self.lora_original.forward(self, x, *args, **kwargs)
    return rms_norm(x, self.weight, self.lora_norm)


def _forward_rotary(self: Any, *args: Any, **kwargs: Any) -> Any:
    forward = self.lora_original.forward
    if not _is_left_to_torch():
        forward = with_loops(forward)
    return forward(self, *args, **kwargs)


_MEMBERS: Mapping[type[Fused], Mapping[str, Any]] = {
    FusedLora: {"forward": _forward_lora, "merge": _merge, "unmerge": _unmerge},
    FusedMlp: {"forward": _forward_gated},
    FusedNorm: {"forward": _forward_norm},
    FusedRotary: {"forward": _forward_rotary},
}


@cache
def _fused_class(kind: Any, base: Any) -> Any:
    return swapped_class(kind, (_fused_class, (kind, base)), base, _MEMBERS[kind], lora_original=base)


def put_in(module: nn.Module, kind: Any, *state: Any) -> None:
    """Make `module` a module of class `kind`, with the values of its `lora_state`."""
    for name, value in zip(kind.lora_state, state, strict=True):
        module.__dict__[name] = value
    own: Any = type(module)
    swap(module, _fused_class(kind, own))


def take_out(module: nn.Module) -> None:
    if isinstance(module, Fused):
        settings = boundary_of(module)
        set_boundary(module, None)  # a boundary set later is on top
        for name in module.lora_state:
            module.__dict__.pop(name, None)
        swap(module, module.original)
        set_boundary(module, settings)
