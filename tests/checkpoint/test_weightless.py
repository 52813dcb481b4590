"""The model without weights against the loaded model: equal names, classes, shapes, dtypes and states."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from isotype.checkpoint.checkpoint import open_model
from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.weightless import skeleton, store
from isotype.core.errors import CheckpointError
from isotype.model.adapters import add_lora
from tests.models import CONFIGS
from tests.pairwise import pairwise

# Attributes that transformers sets while it loads.
_BOOKKEEPING = {"_is_hf_initialized", "_use_kernels"}
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
STORAGES = [
    ("bfloat16", None, None),
    ("float16", None, None),
    ("bfloat16", "nf4", None),
    ("float16", "nf4", True),
    ("bfloat16", "fp4", None),
    ("bfloat16", "int8", None),
]


def look(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value


def state_of(state: Any) -> Any:
    if state is None:
        return None
    tensors = tuple(look(each) for each in (state.absmax, state.code, state.offset))
    shape = None if state.shape is None else tuple(state.shape)
    return (
        state.dtype,
        shape,
        state.blocksize,
        state.quant_type,
        state.nested,
        tensors,
        state_of(state.state2),
    )


def facts(model: Any) -> dict[str, Any]:
    """Return everything of a model that a trace reads, except values and devices."""
    found: dict[str, Any] = {}
    tied = defaultdict(list)
    for name, tensor in model.named_parameters(remove_duplicate=False):
        tied[id(tensor)].append(name)
        extra = (state_of(getattr(tensor, "quant_state", None)), type(tensor).__name__)
        extra += tuple(
            look(getattr(tensor, field, None)) for field in ("CB", "SCB", "blocksize", "quant_storage")
        )
        found[name] = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, extra)
    for name, tensor in model.named_buffers(remove_duplicate=False):
        found[f"buffer {name}"] = look(tensor)
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = {
            k: v for k, v in vars(module).items() if isinstance(v, _PLAIN) and k not in _BOOKKEEPING
        }
        state = vars(module).get("state")
        ours = None if state is None else (look(state.CB), look(state.SCB), state.threshold)
        found[f"module {name}"] = (type_before_parametrizations(module), attributes, ours)
    found["tied"] = sorted(names for names in tied.values() if len(names) > 1)
    return found


@pairwise(
    ["dtype, quantization, double", "name"],
    STORAGES,
    ["llama-tied-bias", "gemma3", "gpt-oss", "qwen3-moe", "gpt2"],
    strength=1,
)
def test_it_equals_the_loaded_model(saved, name, dtype, quantization, double):
    path = saved(name)
    policy = resolve_precision(path, dtype, quantization, "cpu", double_quant=double)
    real = load(path, policy)
    weightless = store(skeleton(open_model(path).model_config, policy), policy)
    assert facts(weightless) == facts(real)
    assert {tensor.device.type for tensor in (*weightless.parameters(), *weightless.buffers())} == {"meta"}
    lora = {"r": 4, "fan_in_fan_out": name == "gpt2" and quantization is None}
    real = add_lora(real, policy, **lora)
    with torch.device("meta"):
        weightless = add_lora(weightless, policy, **lora)
    assert facts(weightless) == facts(real)


def test_a_model_that_is_trained_whole_keeps_its_gradients(saved):
    policy = resolve_precision(saved("llama"), "bfloat16", device="cpu", trainable="full")
    weightless = store(skeleton(open_model(saved("llama")).model_config, policy), policy)
    assert facts(weightless) == facts(load(saved("llama"), policy))
    assert all(parameter.requires_grad for parameter in weightless.parameters())


def test_a_checkpoint_that_is_saved_quantized_keeps_the_layers_it_left_dense(saved, tmp_path):
    config = json.loads((saved("llama") / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "float16",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    policy = resolve_precision(tmp_path, "bfloat16", device="cpu")
    model = store(skeleton(open_model(tmp_path).model_config, policy), policy)
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    assert classes["model.layers.0.mlp.up_proj"] == "Linear4bit"
    assert classes["model.layers.1.mlp.up_proj"] == classes["lm_head"] == "Linear"
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert (layer.compute_dtype, layer.weight.quant_state.dtype) == (torch.bfloat16, torch.bfloat16)
    assert layer.weight.quant_state.nested


def test_mxfp4_is_dequantized_as_load_does():
    config = CONFIGS["gpt-oss"]()
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    policy = resolve_precision(config, "bfloat16", device="h100")
    model = store(skeleton(config, policy), policy)
    assert getattr(model.config, "quantization_config", None) is None
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16
    assert config.quantization_config is not None, "the caller's config is untouched"


def test_the_config_comes_from_a_directory_or_its_file(saved, tmp_path):
    path = saved("llama")
    assert open_model(path).model_config.to_dict() == open_model(path / "config.json").model_config.to_dict()
    with pytest.raises(CheckpointError, match="not a model") as caught:
        open_model(path / "model.safetensors")
    assert caught.value.problems[0].fix == f"give the directory {path}"
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_model(tmp_path)


def test_a_config_that_its_class_cannot_be_built_from():
    config = CONFIGS["llama"]()
    config.num_attention_heads = 0
    policy = resolve_precision(CONFIGS["llama"](), "bfloat16", device="h100")
    with pytest.raises(CheckpointError, match="LlamaForCausalLM fails with ZeroDivisionError"):
        skeleton(config, policy)
