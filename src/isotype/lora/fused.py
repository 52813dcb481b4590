"""PEFT's LoRA layers with fused products, alone or with others that have the same input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import FakeTensor, version_of
from isotype.core.dtypes import autocast_dtype
from isotype.lora.adapted import Reading, read
from isotype.lora.gates import Gate
from isotype.lora.linear import lora_linear
from isotype.lora.loops.products import is_used
from isotype.lora.spec import Spec
from isotype.lora.weights import DenseWeights
from isotype.model.boundary import boundary_of
from isotype.model.walk import kind_of
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
        dtypes = _dtypes(reading.layer.base, gate_input.first)
        return _run(self.weights, (reading,), (gate_input.first, gate_input.second), dtypes, gate_input.gate)[
            0
        ]

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
