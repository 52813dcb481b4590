"""What one call of `isotype.lora.linear.lora_linear` computes."""

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
    """One active adapter of a layer.

    Attributes:
        rank: r.
        scale: what its product is multiplied by: alpha / r, or alpha / sqrt(r) of rsLoRA.
        dropout: probability; 0 in evaluation.
        magnitude: whether it is DoRA's, which comes alone and without dropout.
    """

    rank: int
    scale: float
    dropout: float = 0.0
    magnitude: bool = False


@dataclass(frozen=True)
class Layer:
    """One linear layer: its frozen base, its biases and its active adapters.

    Attributes:
        base: the base layer, which holds the weight.
        biases: what each of its bias vectors is multiplied by: 1 for the base's, the scale for an adapter's.
        adapters: the active ones, in order.
    """

    base: nn.Module
    biases: tuple[float, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each adapter."""
        return tuple(adapter.rank for adapter in self.adapters)

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """What each adapter's product is multiplied by."""
        return tuple(adapter.scale for adapter in self.adapters)

    @cached_property
    def drops(self) -> bool:
        """True if an adapter has dropout."""
        return any(adapter.dropout for adapter in self.adapters)

    @cached_property
    def rank(self) -> int:
        """Rank of all adapters together."""
        return sum(self.ranks)

    @cached_property
    def tensors(self) -> int:
        """How many tensors belong to it."""
        return len(self.biases) + sum(2 + adapter.magnitude for adapter in self.adapters)


_drops = attrgetter("drops")


@dataclass(frozen=True)
class Spec:
    """What one call computes.

    Attributes:
        layers: the layers that read the same input.
        weights: gives their base weights.
        working: dtype of the products: the compute dtype, or float32 where the device has no fast products in it.
        result: dtype of the outputs.
        gate: of an input that is a gated product of two tensors.
        keep: whether a backward will follow, see `DenseWeights.matrix`.
        compiled: whether compiled loops multiply, see `isotype.lora.loops.products`.
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
        """True if dropout leaves an adapter its own X."""
        return any(map(_drops, self.layers))

    @property
    def adapters(self) -> int:
        """How many adapters the layers have together."""
        return sum([len(layer.adapters) for layer in self.layers])
