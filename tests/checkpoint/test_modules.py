"""Checkpoints loaded into modules that are not from transformers: by name, and through a StateDictAdapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import isotype
from isotype.checkpoint.load import load_module
from isotype.model.quantize import quantize_4bit
from isotype.precision.policy import PrecisionPolicy
from tests.refusals import refused

WIDTH = 64


class Block(nn.Module):
    """A module with one matrix for queries, keys and values, and one tensor for all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.experts = nn.Parameter(torch.zeros(2, WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)


class Adapter:
    """Conversion of separate query, key, value and expert tensors, with transposed experts."""

    def from_hf(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = {"head.weight": state["lm_head.weight"], "head.bias": state["lm_head.bias"]}
        for at in range(2):
            layer, block = f"layers.{at}", f"blocks.{at}"
            made[f"{block}.qkv.weight"] = torch.cat([state[f"{layer}.{each}.weight"] for each in "qkv"])
            made[f"{block}.experts"] = torch.stack([state[f"{layer}.experts.{each}"].T for each in range(2)])
            for each in ("weight", "bias"):
                made[f"{block}.norm.{each}"] = state[f"{layer}.ln.{each}"]
        return made

    def to_hf(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = {"lm_head.weight": state["head.weight"], "lm_head.bias": state["head.bias"]}
        for at in range(2):
            layer, block = f"layers.{at}", f"blocks.{at}"
            parts = state[f"{block}.qkv.weight"].chunk(3)
            made |= {f"{layer}.{each}.weight": part for each, part in zip("qkv", parts, strict=True)}
            made |= {f"{layer}.experts.{each}": state[f"{block}.experts"][each].T for each in range(2)}
            made |= {f"{layer}.ln.{each}": state[f"{block}.norm.{each}"] for each in ("weight", "bias")}
        return made


def stored() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    return {name: value.contiguous() for name, value in Adapter().to_hf(model.state_dict()).items()}


def policy_of(dtype: str, quantization: str | None = None, trainable: str = "lora") -> PrecisionPolicy:
    return isotype.resolve_precision(Model(), dtype, quantization, "cpu", trainable=trainable)


def on_meta() -> Model:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return Model()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter(tmp_path: Path, dtype: str) -> None:
    weights = stored()
    save_file(weights, tmp_path / "model.safetensors")
    model = on_meta()
    policy = policy_of(dtype)
    load_module(model, tmp_path, policy, adapter=Adapter())
    wanted = Adapter().from_hf(weights)
    assert set(model.state_dict()) == set(wanted)
    for name, value in model.state_dict().items():
        assert value.dtype == policy.plain
        assert torch.equal(value, wanted[name].to(policy.plain)), name
    assert model.blocks[0].scale == 0.5
    back = Adapter().to_hf(Adapter().from_hf(weights))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())


def test_linear_layers_are_quantized(tmp_path: Path) -> None:
    save_file(weights := stored(), tmp_path / "model.safetensors")
    model = on_meta()
    policy = policy_of("bfloat16", "nf4")
    load_module(model, tmp_path, policy, adapter=Adapter())
    weight = model.blocks[1].qkv.weight
    codes, state = quantize_4bit(
        Adapter().from_hf(weights)["blocks.1.qkv.weight"].to(torch.bfloat16),
        "nf4",
        double_quant=policy.double_quant,
    )
    assert torch.equal(weight, codes)
    assert torch.equal(weight.quant_state.absmax, state.absmax)
    assert model.blocks[1].experts.dtype == torch.bfloat16
    assert torch.isfinite(model.head(torch.ones(1, WIDTH, dtype=torch.bfloat16))).all()


def test_without_an_adapter_names_are_the_module_s_own(tmp_path: Path) -> None:
    original = Model()
    save_file(original.state_dict(), tmp_path / "model.safetensors")
    model = on_meta()
    load_module(model, tmp_path, policy_of("bfloat16"))
    assert all(
        torch.equal(model.state_dict()[name], value.to(torch.bfloat16))
        for name, value in original.state_dict().items()
    )


def test_tensors_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    weights = stored()
    weights["lm_head.bias"] = torch.zeros(11)
    save_file(weights, tmp_path / "model.safetensors")
    assert "head.bias is of shape [11]" in refused(
        isotype.CheckpointError, load_module, on_meta(), tmp_path, policy_of("bfloat16"), adapter=Adapter()
    )
    with pytest.raises(isotype.CheckpointError, match="does not hold the weights of Model"):
        load_module(on_meta(), tmp_path, policy_of("bfloat16"))


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    weights = stored()
    weights["layers.1.q.weight"][3, 4] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(isotype.CheckpointError, match=r"blocks\.1\.qkv\.weight \(1 NaN"):
        load_module(on_meta(), tmp_path, policy_of("bfloat16"), adapter=Adapter())


def test_buffers_that_nobody_computes(tmp_path: Path) -> None:
    save_file(stored(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Model()
    with pytest.raises(isotype.CheckpointError, match=r"blocks\.0\.scale"):
        load_module(model, tmp_path, policy_of("bfloat16"), adapter=Adapter())
