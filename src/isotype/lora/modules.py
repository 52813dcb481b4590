"""Classes of fused LoRA layers, gated MLPs, RMSNorms and attention layers."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import isfunction
from typing import Any

import torch
from torch import nn

from isotype.compat.swapped import Swapped, swap, swapped_class
from isotype.compat.torch import FakeTensor, forward_hooks, forward_pre_hooks, needs_operators, version_of
from isotype.core.dtypes import autocast_dtype
from isotype.lora.adapted import Reading, read
from isotype.lora.gates import Gate, GatedParts
from isotype.lora.linear import Spec, lora_linear
from isotype.lora.loops.products import is_used
from isotype.lora.norms import NormParts, rms_norm
from isotype.lora.rotary import with_loops
from isotype.lora.weights import DenseWeights
from isotype.model.boundary import boundary_of, set_boundary
from isotype.model.walk import kind_of, must_be_called
from isotype.precision.devices.simulated import device_type_of, working_dtype


@dataclass(frozen=True)
class GatedInput:
    """The input of a gated MLP's last layer: `gate.product(first, second)`. The layer computes it and does not save it."""

    gate: Gate
    first: torch.Tensor
    second: torch.Tensor


def _dtypes(base: Any, x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return (dtype in which the base layer computes, dtype of its result)."""
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


_NOTHING: Any = (None, None, {})
"""No outputs are cached. The entries are (input, its version and the modes of the forward, outputs by layer)."""


class Siblings:
    """Layers that their module calls one after another with the same tensor, and that one function computes together.

    The first layer's call computes all outputs, and the calls of the other layers return them. A call computes only the
    output of its own layer if it gets another tensor, if the tensor was modified, or if the tensor has no version counter.
    """

    def __init__(self, weights: DenseWeights, layers: Sequence[Any]) -> None:
        self.__setstate__({"weights": weights, "layers": tuple(layers)})

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts without outputs of a running forward, and without readings of the original layers.
        return {"weights": self.weights, "layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.weights: DenseWeights = state["weights"]
        self.layers: tuple[Any, ...] = state["layers"]
        self._local = threading.local()
        self._readings: dict[nn.Module, Reading] = {}

    def output(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """Return a layer's output for the input X, or None if only PEFT's forward can compute the output now."""
        now = version_of(x), torch.is_grad_enabled(), autocast_dtype(x.device.type)
        of, when, ready = getattr(self._local, "ready", _NOTHING)
        if of is x and when == now and layer in ready:
            output: torch.Tensor = ready.pop(layer)
            if not ready:
                self._local.ready = _NOTHING
            return output
        leads = layer is self.layers[0] and now[0] is not None
        outputs = self._together(self.layers if leads else (layer,), (x,))
        if outputs is None:
            return None
        output = outputs.pop(layer)
        if leads:
            self._local.ready = (x, now, outputs) if outputs else _NOTHING
        return output

    def gated_output(
        self, layer: Any, gate_input: GatedInput, peft_forward: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Return a layer's output for a gated product. The product is not saved for the backward."""
        gate, inputs = gate_input.gate, (gate_input.first, gate_input.second)
        outputs = self._together((layer,), inputs, gate)
        return peft_forward(layer, gate.product(*inputs)) if outputs is None else outputs[layer]

    def _together(
        self, layers: Sequence[Any], inputs: tuple[torch.Tensor, ...], gate: Gate | None = None
    ) -> dict[nn.Module, torch.Tensor] | None:
        """Return the outputs of the first layer, and of the layers with the same dtypes; None if PEFT must compute the first."""
        x = inputs[0]
        first, *others = [self._read(layer, x) for layer in layers]
        if first is None:
            return None
        compute, result = dtypes = _dtypes(first.layer.base, x)
        usable = {layers[0]: first}
        for layer, reading in zip(layers[1:], others, strict=True):
            if reading is not None and _dtypes(reading.layer.base, x) == dtypes:
                usable[layer] = reading
        working = working_dtype(compute, x)
        # A trace assumes the loops on every CPU. They need more memory than torch: the weights of all layers at once.
        compiled = device_type_of(x) == "cpu" if isinstance(x, FakeTensor) else is_used(working, x)
        together = tuple([reading.layer for reading in usable.values()])
        spec = Spec(together, self.weights, working, result, gate, torch.is_grad_enabled(), compiled)
        tensors = [tensor for reading in usable.values() for tensor in reading.tensors]
        return dict(zip(usable, lora_linear(spec, inputs, tensors), strict=True))

    def _read(self, layer: Any, x: torch.Tensor) -> Reading | None:
        former = self._readings.get(layer)
        reading = read(layer, former)
        if reading is None:
            self._readings.pop(layer, None)
        elif reading is not former:
            self._readings[layer] = reading
        return None if reading is None or reading.device != x.device else reading


class Fused(Swapped):
    """Base class of fused modules.

    Attributes:
        lora_state: names of the attributes that `put_in` adds to a module.
        lora_original: class of the module before `put_in`. The `original` of a boundary that is set later is the fused class.
    """

    lora_state: tuple[str, ...] = ()
    lora_original: type[nn.Module]


class FusedLora(Fused):
    """A fused LoRA layer. `lora_siblings` are the layers with the same input. One function computes all of them."""

    lora_state = ("lora_weights", "lora_siblings")
    lora_weights: DenseWeights
    lora_siblings: Siblings

    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, GatedInput):
            return self.lora_siblings.gated_output(self, x, self.lora_original.forward)
        if not args and not kwargs and isinstance(x, torch.Tensor) and not needs_operators():
            output = self.lora_siblings.output(self, x)
            if output is not None:
                return output
        return self.lora_original.forward(self, x, *args, **kwargs)

    # PEFT writes base weights through `.data`, which changes no version counter.
    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.lora_weights.forget(self.get_base_layer())
        return self.lora_original.merge(self, *args, **kwargs)

    def unmerge(self: Any) -> Any:
        self.lora_weights.forget(self.get_base_layer())
        return self.lora_original.unmerge(self)


class FusedMlp(Fused):
    """A gated MLP whose backward recomputes the product. `lora_parts` has the names of the MLP's layers."""

    lora_state = ("lora_parts",)
    lora_parts: GatedParts

    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        parts: GatedParts = self.lora_parts
        down = self._modules[parts.down]
        hooked = must_be_called(forward_hooks(down)) or must_be_called(forward_pre_hooks(down))
        if args or kwargs or hooked or needs_operators() or not isinstance(down, FusedLora):
            return self.lora_original.forward(self, x, *args, **kwargs)
        outputs = {name: self._modules[name](x) for name in parts.order}
        return down(GatedInput(parts.gate, outputs[parts.first], outputs[parts.second]))  # type: ignore[operator]


class FusedNorm(Fused):
    lora_state = ("lora_norm",)
    lora_norm: NormParts

    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or needs_operators() or not x.is_floating_point():
            return self.lora_original.forward(self, x, *args, **kwargs)
        return rms_norm(x, self.weight, self.lora_norm)


class FusedRotary(Fused):
    """An attention layer that applies rotary positions to queries and keys by one function."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = self.lora_original.forward
        return (forward if needs_operators() else with_loops(forward))(self, *args, **kwargs)


@cache
def _fused_class(kind: Any, base: Any) -> Any:
    methods = {name: member for name, member in vars(kind).items() if isfunction(member)}
    return swapped_class(kind, (_fused_class, (kind, base)), base, methods, lora_original=base)


def put_in(module: nn.Module, kind: Any, *state: Any) -> None:
    """Replace the class of `module` by a subclass of `kind`. `state` has one value for each name in `kind.lora_state`."""
    module.__dict__.update(zip(kind.lora_state, state, strict=True))
    base: Any = type(module)
    swap(module, _fused_class(kind, base))


def take_out(module: nn.Module) -> None:
    if isinstance(module, Fused):
        settings = boundary_of(module)
        set_boundary(module, None)  # a boundary that was set later has swapped the class again
        for name in module.lora_state:
            module.__dict__.pop(name, None)
        swap(module, module.original)
        set_boundary(module, settings)
