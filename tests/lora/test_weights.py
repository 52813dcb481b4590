"""Dense copies of base weights: what they are refused for, and for how long."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from isotype.lora.weights import DenseWeights

COPY = 8 * 8 * 4
"""Bytes of a copy in float32."""

Change = Callable[[DenseWeights, list[nn.Module]], None]


def full() -> tuple[DenseWeights, list[nn.Module]]:
    """Room for two copies in float32, and three layers that have asked for one."""
    weights, layers = DenseWeights(2 * COPY), [nn.Linear(8, 8).bfloat16() for _ in range(3)]
    for layer in layers:
        weights.kept(layer, torch.float32)
    assert (weights.copies, weights.bytes) == (2, 2 * COPY)
    return weights, list(layers)


def smaller(weights: DenseWeights, layers: list[nn.Module]) -> None:
    """Its next copy is half as large."""
    weights.kept(layers[0], torch.float16)
    weights.kept(layers[1], torch.float16)


def gone(weights: DenseWeights, layers: list[nn.Module]) -> None:
    del layers[0]
    gc.collect(2)


def more(weights: DenseWeights, layers: list[nn.Module]) -> None:
    weights.budget += COPY


def merged(weights: DenseWeights, layers: list[nn.Module]) -> None:
    weights.forget(layers[0])


@pytest.mark.parametrize("change", [smaller, gone, more, merged])
def test_there_is_room_again(change: Change) -> None:
    weights, layers = full()
    change(weights, layers)
    before = weights.copies
    weights.kept(layers[-1], torch.float32)
    assert weights.copies == before + 1
    assert weights.bytes <= weights.budget


def test_there_is_room_for_less() -> None:
    weights, layers = DenseWeights(COPY + COPY // 2), [nn.Linear(8, 8).bfloat16() for _ in range(2)]
    for layer in layers:
        weights.kept(layer, torch.float32)
    assert weights.copies == 1
    weights.kept(layers[1], torch.float16)
    assert weights.copies == 2
