"""What a load over several processes refuses. Loads themselves are in tests/distributed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft.tuners.lora.dora import DoraLinearLayer

import isotype
from isotype.checkpoint.shard import new_magnitudes
from isotype.compat.peft import dora_without_weights
from isotype.core.errors import PrecisionError


def test_dora_on_int8_layers_is_not_sharded(saved: Callable[..., Path]) -> None:
    path = saved("llama", torch.bfloat16)
    policy = isotype.resolve_precision(path, dtype="bfloat16", quantization="int8", device="cpu")
    model = isotype.add_lora(isotype.load(path, policy), policy, r=2, use_dora=True)
    with pytest.raises(PrecisionError, match=r"DoRA on model\.layers\.0\.\S+, which is stored in int8"):
        new_magnitudes(model)


def test_peft_needs_the_weights_for_new_magnitudes() -> None:
    base, pair = (
        torch.nn.Linear(4, 3, device="meta"),
        {"lora_A": torch.ones(2, 4), "lora_B": torch.zeros(3, 2)},
    )
    layer = DoraLinearLayer(fan_in_fan_out=False)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        layer.update_layer(base_layer=base, scaling=1.0, **pair)
    with dora_without_weights():
        layer.update_layer(base_layer=base, scaling=1.0, **pair)
    assert layer.weight.shape == (3,)
    assert layer.weight.isnan().all()


def test_only_magnitudes_without_values_are_new(saved: Callable[..., Path]) -> None:
    path = saved("llama", torch.bfloat16)
    policy = isotype.resolve_precision(path, dtype="bfloat16", device="cpu")
    model = isotype.add_lora(isotype.load(path, policy), policy, r=2, use_dora=True)
    assert new_magnitudes(model) == {}
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    layer.lora_magnitude_vector["default"].weight.data.fill_(torch.nan)
    assert new_magnitudes(model) == {"base_model.model.model.layers.1.mlp.up_proj": ["default"]}
