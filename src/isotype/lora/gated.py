"""Detection of gated MLPs by their forward instead of their names.

A module with three adapted layers is one if its forward passes its input to two of them, and the product of
one result, through a known activation, and the other to the third, whose result it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.lora.gates import GATES, Gate
from isotype.model.trial import is_close, result_of
from isotype.model.walk import is_tuner_layer


@dataclass(frozen=True)
class GatedParts:
    """Names of the children of a gated MLP: `down(gate.product(first(x), second(x)))`.

    Attributes:
        first: the layer whose result is activated.
        second: the layer whose result multiplies it.
        down: the layer that gets the product.
        gate: the activation.
        order: `first` and `second` in the order of the module's calls.
    """

    first: str
    second: str
    down: str
    gate: Gate
    order: tuple[str, str]


class _Stub(nn.Module):
    """Replacement of a layer that records its input and returns a given result."""

    def __init__(self, name: str, result: torch.Tensor, calls: list[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.name, self.result, self.calls = name, result, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.name, x))
        return self.result


def gated_parts(module: nn.Module) -> GatedParts | None:
    """Return the parts of a gated MLP; None for any other module."""
    layers = [name for name, child in module.named_children() if is_tuner_layer(child)]
    drops = any(isinstance(part, nn.Dropout) and part.p for part in _besides(module, layers))
    if len(layers) != 3 or drops:
        return None
    generator = torch.Generator().manual_seed(0)
    results = {name: torch.randn(2, 8, dtype=torch.float64, generator=generator) for name in layers}
    calls: list[tuple[str, torch.Tensor]] = []
    stubs = {name: _Stub(name, results[name], calls) for name in layers}
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, _modules={**module._modules, **stubs})
    x = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    result = result_of(partial(type(module).forward, twin), x)
    if [inputs is x for _, inputs in calls] != [True, True, False]:
        return None
    (one, _), (two, _), (down, product) = calls
    if len({one, two, down}) != 3 or result is not results[down]:
        return None
    for first, second in ((one, two), (two, one)):
        for gate in GATES.values():
            if is_close(product, gate.product(results[first], results[second]), rtol=1e-6, atol=1e-8):
                return GatedParts(first, second, down, gate, (one, two))
    return None


def _besides(module: nn.Module, layers: list[str]) -> list[nn.Module]:
    others = [child for name, child in module.named_children() if name not in layers]
    return [part for child in others for part in child.modules()]


def call_in_order(module: Any, parts: GatedParts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (result of `first`, result of `second`), called in the module's order."""
    outputs = {name: module._modules[name](x) for name in parts.order}
    return outputs[parts.first], outputs[parts.second]
