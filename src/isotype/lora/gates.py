"""Computes gated products `act(gate) * up` and their gradients, and finds the gated MLPs of a model.

SwiGLU and GEGLU: https://arxiv.org/abs/2002.05202; the squared ReLU: https://arxiv.org/abs/2109.08668.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from isotype.lora.kernels import ACTIVATIONS, kernel_of
from isotype.lora.loops import elementwise
from isotype.model.modes import is_close, result_of
from isotype.model.walk import is_tuner_layer

_aten = torch.ops.aten
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Gate:
    """An elementwise activation for tensors of any shape and float dtype.

    Attributes:
        name: `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2` or `sigmoid`.
        through: backward of the activation: a function of (gradient of the result, input) that returns the input's
            gradient. The function may overwrite the gradient of the result.
    """

    name: str
    activate: Callable[[torch.Tensor], torch.Tensor]
    through: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __reduce__(self) -> tuple[Callable[[str], Gate], tuple[str]]:
        return _gate, (self.name,)  # pickle cannot store torch's operators

    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.name == "silu" and elementwise.usable(gate, up):
            return elementwise.silu_product(gate, up)
        kernel = self._gpu_kernel(gate, up)
        if kernel is not None:
            return cast("torch.Tensor", kernel.product(self.name, gate, up))
        active = self.activate(gate)
        # Autograd saves the results of some activations, which must not be overwritten.
        return active * up if torch.is_grad_enabled() else active.mul_(up)

    def backward(self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> _Three:
        """Return (the product, gradients of `gate` and `up`). `grad` is the gradient of the product, and may be overwritten."""
        if self.name == "silu" and elementwise.usable(grad, gate, up):
            return elementwise.silu_product_backward(grad, gate, up)
        kernel = self._gpu_kernel(grad, gate, up)
        if kernel is not None:
            return cast("_Three", kernel.product_backward(self.name, grad, gate, up))
        active = self.activate(gate)
        product, d_up = active * up, active.mul_(grad)
        return product, self.through(grad.mul_(up), gate), d_up

    def _gpu_kernel(self, *tensors: torch.Tensor) -> Any | None:
        first = tensors[0]
        alike = all((x.dtype, x.shape) == (first.dtype, first.shape) for x in tensors)
        # The kernels have no derivatives.
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return None if differentiated or not alike else kernel_of("gated", *tensors, detail=self.name)


def _gate(name: str) -> Gate:
    return GATES[name]


def _over(operator: Any, **settings: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a backward that overwrites the incoming gradient, so that no tensor of an MLP's width is allocated."""

    def through(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = operator(grad, x, **settings, grad_input=grad)
        return gradient

    return through


_BACKWARD: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": _over(_aten.silu_backward),
    "gelu": _over(_aten.gelu_backward),
    "gelu_tanh": _over(_aten.gelu_backward, approximate="tanh"),
    "relu": lambda grad, x: grad * (x > 0),
    "relu2": lambda grad, x: grad * torch.relu(x).mul_(2),
    "sigmoid": lambda grad, x: _aten.sigmoid_backward(grad, torch.sigmoid(x)),
}
GATES = {name: Gate(name, ACTIVATIONS[name], through) for name, through in _BACKWARD.items()}


# --------------------------------------------------------------------------------------------------- detection
# A gated MLP is detected by running its forward with stand-ins for its three layers with adapters. The input goes to
# two layers. A known activation is applied to one of their results, which is then multiplied by the other result. The
# product goes to the third layer.


@dataclass(frozen=True)
class GatedParts:
    """The layers of a gated MLP `down(gate.product(first(x), second(x)))`. The MLP calls `order[0]` first."""

    first: str
    second: str
    down: str
    gate: Gate
    order: tuple[str, str]


def gated_parts(module: nn.Module) -> GatedParts | None:
    layers = [name for name, child in module.named_children() if is_tuner_layer(child)]
    others = [child for name, child in module.named_children() if name not in layers]
    drops = any(isinstance(part, nn.Dropout) and part.p for child in others for part in child.modules())
    if len(layers) != 3 or drops:
        return None
    generator = torch.Generator().manual_seed(0)
    results = {name: torch.randn(2, 8, dtype=torch.float64, generator=generator) for name in layers}
    calls: list[tuple[str, torch.Tensor]] = []

    def called(name: str, x: torch.Tensor) -> torch.Tensor:
        calls.append((name, x))
        return results[name]

    stubs = {name: partial(called, name) for name in layers}
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, _modules={**module._modules, **stubs})
    x = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    result = result_of(partial(type(module).forward, twin), x)
    if [inputs is x for _, inputs in calls] != [True, True, False]:
        return None
    (before, _), (after, _), (down, product) = calls
    if len({before, after, down}) != 3 or result is not results[down]:
        return None
    for first, second in ((before, after), (after, before)):
        for gate in GATES.values():
            if is_close(product, gate.product(results[first], results[second]), rtol=1e-6, atol=1e-8):
                return GatedParts(first, second, down, gate, (before, after))
    return None
