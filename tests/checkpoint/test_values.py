"""Loaded values against transformers' own load: every parameter and buffer, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file
from torch import nn

import isotype
from isotype.checkpoint.weightless import wanted_quantization
from isotype.model.boundary import original_class
from isotype.model.experts.stack import quantized_stack, stacked_weights
from isotype.precision.policy import PrecisionPolicy, is_pinned
from tests.models import quiet
from tests.zoo import ARCHITECTURES

CHOSEN = (
    *("llama", "gpt2", "gpt_oss", "deepseek_v3", "qwen3_moe", "gemma4_text", "jamba", "mamba"),
    *("llava-vl", "qwen2_vl-vl", "bert-cls", "t5-s2s"),
)
STORAGES = (("bfloat16", None), ("float16", None), ("bfloat16", "nf4"), ("float16", "int8"))


def saved(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    with quiet():
        ARCHITECTURES[name].build(dtype).save_pretrained(directory)  # type: ignore[operator]
    return directory


def theirs(path: Path, policy: PrecisionPolicy, cls: Any, dtype: torch.dtype, quantized: bool) -> nn.Module:
    config = wanted_quantization(policy, None) if quantized else None
    with quiet():
        loaded: nn.Module = cls.from_pretrained(path, dtype=dtype, quantization_config=config)
    return loaded


def tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def state_of(model: nn.Module, name: str) -> dict[str, Any]:
    """Return the dequantized values of a quantized weight."""
    layer: Any = model.get_submodule(name.rpartition(".")[0])
    weight = layer.weight
    if getattr(weight, "quant_state", None) is not None:
        return weight.quant_state.as_dict()  # type: ignore[no-any-return]
    scales = layer.state.SCB if getattr(weight, "SCB", None) is None else weight.SCB
    return {} if scales is None else {"SCB": scales}


def same(ours: torch.Tensor, other: torch.Tensor) -> bool:
    alike = ours.dtype == other.dtype and ours.shape == other.shape
    return alike and torch.equal(*(value.detach().reshape(-1).view(torch.uint8) for value in (ours, other)))


def quantized_stacks(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    return [each for each in stacked_weights(model) if quantized_stack(*each[1:]) is not None]


def assert_same_values(path: Path, dtype: str, quantization: str | None) -> int:
    """Assert equality with transformers' load, and return the number of tensors; two groups differ in dtype.

    Pinned float32 tensors are not rounded. Tensors that a class creates in float32 without pinning them (`A_log` of a
    Mamba layer) are stored as the policy says.
    """
    policy = isotype.resolve_precision(path, dtype, quantization, device="cpu")
    model = isotype.load(path, policy)
    cls = original_class(model)
    other = dict(tensors(theirs(path, policy, cls, policy.plain, policy.quantized)))
    wide = dict(tensors(theirs(path, policy, cls, torch.float32, False)))
    quantized = theirs(path, policy, cls, policy.plain, policy.quantized) if policy.quantized else None
    found = {name: value for name, value in tensors(model) if ".parametrizations." not in name}
    stacks = {f"{path}.{name}": getattr(module, name) for path, module, name in quantized_stacks(model)}
    for name, value in stacks.items():
        dense = other.pop(name)
        codes, state = (
            quantize_4bit(dense.data, quant_type=policy.storage) if policy.storage != "int8" else (None, None)
        )
        if codes is not None:
            assert same(value, dequantize_4bit(codes, state)), name
        else:
            # Half a step of int8, and the rounding of float16 to 11 digits of the value and of its scale.
            assert (value - dense).abs().max() <= (0.5 / 127 + 2**-10) * dense.abs().max(), name
    assert list(found) == list(other)
    for name, value in found.items():
        kept = value.dtype == torch.float32 and other[name].dtype != torch.float32
        wanted = wide[name] if kept else other[name]
        if (
            isinstance(value, nn.Parameter)
            and wanted.dtype == torch.float32
            and not is_pinned(name, policy.pinned)
        ):
            wanted = wanted.to(value.dtype)  # created in float32 by its class, which does not pin it
        assert same(value, wanted), (name, value.dtype, other[name].dtype)
        if quantized is not None and type(value).__name__ in ("Params4bit", "Int8Params"):
            state, wanted_state = state_of(model, name), state_of(quantized, name)
            assert state.keys() == wanted_state.keys()
            assert state
            for key, each in wanted_state.items():
                if key == "dtype":
                    continue  # the compute dtype, which the policy sets
                assert same(state[key], each) if torch.is_tensor(each) else state[key] == each, (name, key)
    return len(found)


@pytest.mark.filterwarnings("ignore:Some weights of")
@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        pytest.param(
            name,
            *storage,
            id=f"{name}-{storage[0]}-{storage[1]}",
            marks=()
            if name in CHOSEN
            and name != "qwen2_vl-vl"
            and STORAGES.index(storage) == CHOSEN.index(name) % len(STORAGES)
            else pytest.mark.exhaustive,
        )
        for name in ARCHITECTURES
        for storage in STORAGES
    ],
)
def test_values_are_those_of_transformers(
    name: str, dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    assert assert_same_values(saved(name, tmp_path), dtype, quantization) > 10


@pytest.mark.filterwarnings("ignore:Some weights of")
@pytest.mark.parametrize(
    ("name", "turned"),
    [
        ("qwen3_vl_moe-vl", False),
        ("qwen3_vl_moe-vl", True),
        pytest.param("inkling2_text", False, marks=pytest.mark.newest),
    ],
)
def test_stacks_are_quantized_whatever_converts_them(name: str, turned: bool, tmp_path: Path) -> None:
    """Qwen3-VL's conversion reads the shape of a weight that is quantized by then; Inkling's names refer to groups."""
    path = saved(name, tmp_path)
    weights = load_file(path / "model.safetensors")
    if turned:
        stacks = {name: value for name, value in weights.items() if ".experts." in name and value.ndim == 3}
        weights |= {name: value.transpose(1, 2).contiguous() for name, value in stacks.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert assert_same_values(path, "bfloat16", "nf4") > 10
