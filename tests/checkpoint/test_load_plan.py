"""The plan of a load against the load itself, and every difference between a checkpoint and a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from isotype.checkpoint.formats.config import read_config
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.inspect import LoadPlan, load_plan
from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.weightless import skeleton
from isotype.core.dtypes import dtype_name
from isotype.core.errors import CheckpointError
from isotype.core.names import plain_name
from isotype.model.experts.stack import held_stack
from isotype.precision.policy import PrecisionPolicy
from tests.checkpoint.test_load import mxfp4_checkpoint
from tests.models import CONFIGS, quiet, save_tiny
from tests.zoo import ARCHITECTURES

CHOSEN = (
    "llama",
    "gpt2",
    "t5-s2s",
    "gemma3-vl",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "mamba",
    "bert-cls",
    "qwen3_vl_moe-vl",
    "hrm_text",
)
STORAGES = (
    ("bfloat16", None),
    ("float16", None),
    ("float32", None),
    ("bfloat16", "nf4"),
    ("float16", "int8"),
)


def plan_of(
    path: Path, dtype: str = "bfloat16", quantization: str | None = None, model_class: Any = None
) -> LoadPlan:
    policy = resolve_precision(path, dtype, quantization, "cpu")
    return load_plan(skeleton(read_config(path), policy, model_class=model_class), read_headers(path), policy)


def held(value: torch.Tensor, module: nn.Module) -> str:
    """Return the storage of a loaded tensor: a dtype's name, or a quantization format."""
    if type(value).__name__ == "Params4bit":
        return str(value.quant_type)  # type: ignore[attr-defined]
    stack = held_stack(module)
    if stack is not None:
        return stack.storage
    return "int8" if type(value).__name__ == "Int8Params" else dtype_name(value.dtype)


def assert_as_planned(plan: LoadPlan, model: Any) -> None:
    """Assert that the plan has every parameter and buffer of the loaded model, with its storage."""
    plan.match.require_complete()
    planned = {tensor.name: tensor.storage for tensor in plan.tensors}
    real = {
        plain_name(name): held(value, model.get_submodule(name.rpartition(".")[0]))
        for name, value in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }
    compared = {name: storage for name, storage in planned.items() if name in real}
    assert compared == {name: real[name] for name in compared}
    rest = (
        set(real)
        - set(planned)
        - set(plan.match.tied)
        - set(plan.match.buffers)
        - set(plan.match.initialised)
    )
    beside = ("absmax", "quant_map", "parametrizations.")
    assert {name for name in rest if not any(each in name for each in beside)} == set()


NAMES = [name for name in CONFIGS if name != "gemma3-vision"]


@pytest.mark.parametrize(
    ("name", "storage"), [(name, STORAGES[at % len(STORAGES)]) for at, name in enumerate(NAMES)], ids=str
)
def test_the_model_is_loaded_as_planned(saved, name, storage):
    path = saved(name, torch.bfloat16)
    plan = plan_of(path, *storage)
    with quiet():
        model = load(path, resolve_precision(path, *storage, "cpu"))
    assert_as_planned(plan, model)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in CHOSEN else pytest.mark.exhaustive) for n in ARCHITECTURES],
)
def test_every_architecture_finds_its_own_weights(tmp_path, name):
    with quiet():
        model: Any = ARCHITECTURES[name].build(torch.bfloat16)
        model.save_pretrained(tmp_path)
        plan = plan_of(tmp_path, model_class=type(model))
    plan.match.require_complete()
    state = model.state_dict()
    planned = {tensor.name: tensor.shape for tensor in plan.tensors}
    assert planned == {name: tuple(state[name].shape) for name in planned}
    assert set(planned) | set(plan.match.tied) | set(plan.match.initialised) == set(state)
    assert plan.match.surplus == ()
    read = {(source.file, source.name) for tensor in plan.tensors for source in tensor.sources}
    assert read == {(header.file, header.name) for header in read_headers(tmp_path).tensors}


Change = Callable[[dict[str, torch.Tensor]], None]


def changed(name: str, directory: Path, change: Change) -> Path:
    """Save a tiny checkpoint with changed tensors."""
    save_tiny(name, directory, torch.bfloat16)
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def refused(plan: LoadPlan) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan.match.require_complete()
    return str(caught.value)


def rename(old: str, new: str) -> Change:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if old in name]:
            weights[name.replace(old, new)] = weights.pop(name)

    return change


def compared(path: Path, **kwargs: Any) -> LoadPlan:
    policy = PrecisionPolicy(torch.bfloat16, "bfloat16")
    return load_plan(skeleton(read_config(path), policy, **kwargs), read_headers(path), policy)


def test_a_renamed_tensor_is_named_with_its_cure(tmp_path):
    name = "layers.0.self_attn.q_proj.weight"
    path = changed("llama", tmp_path, rename(name, "layers.0.self_attn.q_porj.weight"))
    assert refused(compared(path)) == (
        f"{path} does not hold the weights of LlamaForCausalLM\n"
        "  - model.layers.0.self_attn.q_proj.weight is in no file\n"
        f"    expected  a tensor of shape [64, 64] under this name in {path}\n"
        "    fix       model.safetensors has model.layers.0.self_attn.q_porj.weight of this shape: rename this tensor, "
        "or download or save the checkpoint again"
    )


def test_a_tensor_renamed_in_all_layers_is_one_problem(tmp_path):
    path = changed("llama", tmp_path, rename("mlp.gate_proj", "mlp.w1"))
    text = refused(compared(path))
    assert "- model.layers.*.mlp.gate_proj.weight (2 tensors) are in no file" in text
    assert "has model.layers.0.mlp.w1.weight of this shape: rename this tensor and similar tensors" in text
    assert text.count("  - ") == 1


def test_missing_tensors_and_wrong_shapes_come_in_one_error(tmp_path):
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.norm.weight"]
        name = "model.layers.1.mlp.down_proj.weight"
        weights[name] = weights[name].T.contiguous()

    text = refused(compared(changed("llama", tmp_path, change)))
    assert "- model.norm.weight is in no file" in text
    assert "fix       download or save the checkpoint again; to start this tensor from random values" in text
    assert (
        "- model.layers.1.mlp.down_proj.weight is of shape [96, 64], in model.safetensors\n"
        "    expected  shape [64, 96], according to config.json"
    ) in text


def test_one_of_the_experts_under_another_name(tmp_path):
    path = changed(
        "qwen3-moe", tmp_path, rename("layers.0.mlp.experts.2.up_proj", "layers.0.mlp.experts.2.up")
    )
    text = refused(compared(path))
    assert "model.layers.0.mlp.experts.gate_up_proj" in text
    assert "has model.layers.0.mlp.experts.2.up.weight, which the model does not use: rename it" in text


def test_weights_of_another_model(tmp_path, saved):
    save_tiny("gpt2", tmp_path)
    (tmp_path / "config.json").write_bytes((saved("llama") / "config.json").read_bytes())
    text = refused(compared(tmp_path))
    assert f"- {tmp_path} holds transformer.h.0.attn.c_attn.bias" in text
    assert "expected  weights of LlamaForCausalLM: model.embed_tokens.weight" in text
    assert text.count("  - ") == 1


def test_a_tensor_for_which_there_are_two(tmp_path):
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["norm.weight"] = weights["model.norm.weight"].clone()

    text = refused(compared(changed("llama", tmp_path, change)))
    assert (
        "- model.norm.weight twice: model.norm.weight in model.safetensors and norm.weight in model.safetensors"
        in text
    )


def test_a_head_of_another_class_starts_from_fresh_values(saved):
    auto = transformers.AutoModelForSequenceClassification
    plan = compared(saved("llama"), model_class=auto, num_labels=1)
    plan.match.require_complete()
    assert dict(plan.match.initialised) == {
        "score.weight": "the checkpoint is a LlamaForCausalLM, so LlamaForSequenceClassification initialises "
        "this part with random values"
    }
    assert [tensor.name for tensor in plan.match.surplus] == ["lm_head.weight"]


def test_its_own_head_is_not_left_to_chance(tmp_path):
    path = changed("llama", tmp_path, lambda weights: weights.__delitem__("lm_head.weight"))
    assert "- lm_head.weight is in no file" in refused(compared(path))


def test_tied_weights_and_computed_buffers_are_in_no_file(saved):
    plan = compared(saved("llama-tied-bias"))
    plan.match.require_complete()
    assert dict(plan.match.tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "model.rotary_emb.inv_freq" in plan.match.buffers


def test_what_is_done_to_a_tensor_in_words(saved):
    plan = plan_of(saved("qwen3-moe", torch.bfloat16), "bfloat16", "nf4")
    how = {tensor.name: (tensor.stored, tensor.storage, tensor.how) for tensor in plan.tensors}
    experts = "model.layers.0.mlp.experts"
    assert how[f"{experts}.gate_up_proj"] == ("bfloat16", "nf4", "stacked, joined, quantized")
    assert how["model.layers.0.self_attn.q_proj.weight"] == ("bfloat16", "nf4", "quantized")
    assert how["model.norm.weight"] == ("bfloat16", "bfloat16", "as stored")
    (gate_up,) = [tensor for tensor in plan.tensors if tensor.name == f"{experts}.gate_up_proj"]
    assert [source.name.rpartition("experts.")[2] for source in gate_up.sources][:3] == [
        "0.gate_proj.weight",
        "0.up_proj.weight",
        "1.gate_proj.weight",
    ]
    file = gate_up.sources[0]
    assert file.begin > 0
    assert gate_up.bytes == 2 * math.prod(gate_up.shape)


def test_pinned_tensors_stay_float32(saved):
    plan = plan_of(saved("t5", torch.bfloat16), "bfloat16")
    pinned = {tensor.name for tensor in plan.tensors if tensor.pinned}
    assert pinned == {
        f"{side}.block.{n}.layer.{at}.DenseReluDense.wo.weight"
        for side, at in (("encoder", 1), ("decoder", 2))
        for n in (0, 1)
    }
    assert {tensor.storage for tensor in plan.tensors if tensor.pinned} == {"float32"}
    assert {tensor.how for tensor in plan.tensors if tensor.pinned} == {"cast"}


def test_any_module_has_a_plan(tmp_path):
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    save_file(
        {name: value.clone() for name, value in module.state_dict().items()}, tmp_path / "model.safetensors"
    )
    policy = PrecisionPolicy(torch.bfloat16, "nf4")
    plan = load_plan(module.to("meta"), read_headers(tmp_path / "model.safetensors"), policy)
    plan.match.require_complete()
    assert {tensor.name: tensor.storage for tensor in plan.tensors} == {
        "0.weight": "nf4",
        "0.bias": "bfloat16",
        "1.weight": "bfloat16",
        "1.bias": "bfloat16",
        "1.running_mean": "float32",
        "1.running_var": "float32",
        "1.num_batches_tracked": "int64",
        "2.weight": "nf4",
        "2.bias": "bfloat16",
    }
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_an_unknown_quantization_has_no_plan(saved):
    policy = PrecisionPolicy(torch.bfloat16, "bfloat16")
    config = read_config(saved("llama"))
    model = skeleton(config, policy)
    model.config.quantization_config = {"quant_method": "aqlm"}
    with pytest.raises(CheckpointError, match="quantized by aqlm"):
        load_plan(model, read_headers(saved("llama")), policy)


@pytest.mark.parametrize(("name", "storage"), [("llama", "nf4"), ("gpt2", "nf4"), ("gpt2", "int8")])
def test_a_checkpoint_that_is_saved_quantized_is_taken_as_stored(saved, tmp_path, name, storage):
    with quiet():
        load(saved(name), resolve_precision(saved(name), "bfloat16", storage, "cpu")).save_pretrained(
            tmp_path
        )
        plan = plan_of(tmp_path, "bfloat16", storage)
        model = load(tmp_path, resolve_precision(tmp_path, "bfloat16", storage, "cpu"))
    assert_as_planned(plan, model)
    assert {(tensor.storage, tensor.how) for tensor in plan.tensors} == {
        (storage, "as stored"),
        ("bfloat16", "as stored"),
    }


@pytest.mark.parametrize(
    ("quantization", "how"), [(None, "dequantized"), ("mxfp4", "as stored"), ("nf4", "as stored")]
)
def test_mxfp4_experts_are_dequantized_unless_a_quantization_is_asked_for(tmp_path, quantization, how):
    path, dense = mxfp4_checkpoint(tmp_path)
    plan = plan_of(path, "bfloat16", quantization)
    assert_as_planned(plan, load(path, resolve_precision(path, "bfloat16", quantization, device="cpu")))
    experts = {tensor.name: tensor for tensor in plan.tensors if tensor.name in dense}
    assert {(tensor.stored, tensor.how) for tensor in experts.values()} == {("mxfp4", how)}
    assert {name: tensor.shape for name, tensor in experts.items()} == {
        name: tuple(value.shape) for name, value in dense.items()
    }


def fp8(weights: dict[str, torch.Tensor]) -> None:
    """Replace linear weights by FP8 codes with block scales, in DeepSeek-V3's layout."""
    for name in [name for name in weights if name.endswith("proj.weight")]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.ones(1, 1)


def test_fp8_with_block_scales_is_dequantized(tmp_path):
    plan = compared(changed("deepseek-v3", tmp_path, fp8))
    plan.match.require_complete()
    assert plan.match.surplus == ()
    experts = {tensor.how for tensor in plan.tensors if ".experts.gate_up_proj" in tensor.name}
    assert experts == {"dequantized, stacked, joined"}
    assert {tensor.how for tensor in plan.tensors if tensor.name.endswith("o_proj.weight")} == {"dequantized"}


def packed_checkpoint(model: str, directory: Path, name: str, shape: list[int]) -> Path:
    config = json.loads((changed(model, directory, packed(name, shape)) / "config.json").read_text())
    settings = {"num_bits": 4, "strategy": "group", "group_size": 32}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings}},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def packed(name: str, shape: list[int]) -> Change:
    """Pack a weight like compressed-tensors: eight 4-bit integers per int32, scales, and its shape."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        rows, columns = weights.pop(name).shape
        weights[f"{name}_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
        weights[f"{name}_scale"] = torch.ones(rows, columns // 32, dtype=torch.bfloat16)
        weights[f"{name}_shape"] = torch.tensor(shape)

    return change


def test_packed_integers_have_the_shape_that_is_written_beside_them(tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    plan = compared(packed_checkpoint("llama", tmp_path / "whole", name, [64, 64]))
    plan.match.require_complete()
    (query,) = [tensor for tensor in plan.tensors if tensor.name == name]
    assert (query.stored, query.how, len(query.sources)) == ("compressed-tensors", "dequantized", 3)
    for shape in ([64, 32], [-1, 2**62], [64, 72]):
        text = refused(compared(packed_checkpoint("llama", tmp_path / str(shape), name, shape)))
        assert (
            f"{name}_packed: [64, 8] int32 words, but weight_shape declares {shape} integers of 4 bits"
            in text
        )
    text = refused(compared(packed_checkpoint("llama", tmp_path / "vector", name, [64])))
    assert f"{name}_packed: packed without a weight_shape of int64" in text


def test_a_damaged_shape_of_a_packed_expert_is_refused(tmp_path):
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    text = refused(compared(packed_checkpoint("qwen3-moe", tmp_path, name, [-3, 64])))
    assert (
        f"{name}_packed: [32, 8] int32 words, but weight_shape declares [-3, 64] integers of 4 bits" in text
    )
