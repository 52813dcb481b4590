"""Models in memory of every kind: what is measured, and that nothing of them changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import isotype
from isotype.checkpoint.dequantize import dequantize
from isotype.model.boundary import Boundary, set_boundary
from tests.models import quiet, save_tiny, tiny_batch, tiny_model
from tests.ranges.test_measure import agrees, reference

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def adapted(name: str, dtype: torch.dtype, **options: Any) -> Any:
    """A tiny model with adapters whose second matrix is not zero."""
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(tiny_model(name, dtype), config, autocast_adapter_dtype=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.02)
    return model


def state(model: nn.Module) -> dict[str, Any]:
    """Whatever a measurement may not change."""
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {name: each.grad for name, each in model.named_parameters()},
        "trained": [each.requires_grad for each in model.parameters()],
        "modes": [each.training for each in model.modules()],
        "classes": [type(each) for each in model.modules()],
        "hooks": [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()],
        "held": [sorted(vars(each)) for each in model.modules()],
        "random": torch.get_rng_state(),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_agree_with_a_plain_run(dtype: torch.dtype, dora: bool) -> None:
    model, batch = adapted("llama", dtype, use_dora=dora), tiny_batch("llama")
    model.train()
    before = state(model)
    ranges = isotype.measure_ranges(model, batch)
    assert same(state(model), before)
    agrees(ranges, reference(model, batch))
    trained = {name for name, each in ranges.by_module.items() if each.weight_gradient}
    assert trained >= {f"model.layers.0.mlp.up_proj.lora_{part}" for part in "AB"}
    assert "model.layers.0.mlp.up_proj" not in trained


def test_gradients_of_weights_agree_with_a_plain_run() -> None:
    model, batch = tiny_model("llama-tied-bias", BF16), tiny_batch("llama")
    ranges = isotype.measure_ranges(model, batch)
    plain = copy.deepcopy(model).double()
    plain(**batch, use_cache=False).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, module in plain.named_modules():
        own = dict(module.named_parameters(recurse=False)).values()
        if name == "lm_head" or not own:
            continue  # its weight is the embedding's
        found = ranges.by_module[name]
        assert found.weight == pytest.approx(max(float(each.detach().abs().max()) for each in own))
        assert found.weight_gradient == pytest.approx(
            max(float(each.grad.abs().max()) for each in own), rel=1e-4
        )


@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int8"])
def test_quantized_layers_are_measured_dequantized(quantization: str, tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "model", BF16)
    policy = isotype.resolve_precision(path, "float16", quantization, device="t4")
    with quiet():
        model = isotype.add_lora(isotype.load(path, policy, device_map={"": "cpu"}), policy, r=4)
    norm = model.get_submodule("base_model.model.model.norm").float()
    set_boundary(norm, "float32", F16)
    batch = tiny_batch("llama")
    before = state(model)
    ranges = isotype.measure_ranges(model, batch)
    assert same(state(model), before)
    assert isinstance(norm, Boundary)
    plain = copy.deepcopy(model.unload())
    set_boundary(plain.model.norm, None, F16)
    dequantize(plain, F32)
    seen = reference(plain, batch)
    assert ranges.by_module["model.layers.0.mlp.up_proj"].kind == "linear"
    # The second matrices of the adapters are zero: the base model computes what it computes alone.
    alone = [each for each in ranges.modules if ".lora_" not in each.name]
    agrees(replace(ranges, modules=tuple(alone)), seen, rel=1e-3)
