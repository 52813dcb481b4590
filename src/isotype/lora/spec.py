"""The settings of a call of `isotype.lora.linear.lora_linear`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch
from torch import nn

from isotype.lora.gates import Gate
from isotype.lora.weights import DenseWeights


@dataclass(frozen=True)
class Adapter:
    """An active adapter of a layer.

    Attributes:
        scale: alpha / r, for rsLoRA alpha / sqrt(r).
        magnitude: True if the adapter is DoRA. A layer with DoRA has no other adapter and no dropout.
    """

    rank: int
    scale: float
    dropout: float = 0.0
    magnitude: bool = False


@dataclass(frozen=True)
class Layer:
    """A linear layer: the frozen base layer, the factor of each bias (1 or an adapter's scale) and the active adapters."""

    base: nn.Module
    biases: tuple[float, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(adapter.rank for adapter in self.adapters)

    @cached_property
    def scales(self) -> tuple[float, ...]:
        return tuple(adapter.scale for adapter in self.adapters)

    @cached_property
    def drops(self) -> bool:
        return any(adapter.dropout for adapter in self.adapters)

    @cached_property
    def rank(self) -> int:
        return sum(self.ranks)

    @cached_property
    def tensors(self) -> int:
        return len(self.biases) + sum(2 + adapter.magnitude for adapter in self.adapters)


_drops = attrgetter("drops")


@dataclass(frozen=True)
class Spec:
    """The settings of a call for layers with the same input X.

    Attributes:
        working: dtype of the products: the compute dtype, or float32 if the device emulates the compute dtype.
        gate: computes X if X is a gated product of two tensors; else None.
        keep: True if a backward may follow. If False, packed 4-bit weights may be multiplied without dequantization.
        compiled: True if compiled loops compute the products, see `isotype.lora.loops.products`.
    """

    layers: tuple[Layer, ...]
    weights: DenseWeights
    working: torch.dtype
    result: torch.dtype
    gate: Gate | None = None
    keep: bool = True
    compiled: bool = False

    @property
    def drops(self) -> bool:
        """True if an adapter has dropout: each adapter then has its own input."""
        return any(map(_drops, self.layers))

    @property
    def adapters(self) -> int:
        return sum([len(layer.adapters) for layer in self.layers])
