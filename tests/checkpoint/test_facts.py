"""Facts about modules, configs, directories, GGUF files and hub ids."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Blip2Config,
    Gemma2Config,
    Gemma3Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers import __version__ as version

from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.checkpoint.facts import facts_of as facts_in_memory
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.weightless import skeleton
from isotype.core.errors import CheckpointError, PrecisionError
from isotype.precision.facts import ModelFacts, QuantizationFacts
from isotype.precision.policy import PrecisionPolicy
from isotype.train.describe import weight_bytes
from tests.adapters import takes_add_adapter
from tests.refusals import refused

# PEFT 0.21 reads a property of transformers 5.23 by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}


def llama(dtype: torch.dtype | None = None, **more: Any) -> LlamaConfig:
    return LlamaConfig(**{**TEXT, "dtype": dtype, **more})


def saved(directory: Path, dtype: torch.dtype = torch.bfloat16, config: Any = None, **options: Any) -> Path:
    AutoModelForCausalLM.from_config(config or llama(), dtype=dtype).save_pretrained(directory, **options)
    return directory


def facts_of(model: Any, revision: str | None = None) -> ModelFacts:
    """Return the facts about a module, a config or a named checkpoint."""
    if isinstance(model, (str, Path)):
        return open_checkpoint(model, revision).facts
    return facts_in_memory(model)


def message(model: Any) -> str:
    with pytest.raises((CheckpointError, PrecisionError)) as caught:
        facts_of(model)
    return str(caught.value)


# Configs


def test_a_config() -> None:
    config = llama(torch.float16)
    facts = facts_of(config)
    parameters = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    assert facts == ModelFacts(
        source="LlamaConfig",
        model_type="llama",
        trained_dtype=torch.float16,
        parameters=parameters,
        parameter_bytes=2 * parameters,
    )


def test_a_config_without_a_dtype() -> None:
    facts = facts_of(llama())
    assert (facts.trained_dtype, facts.parameter_bytes) == (None, None)
    assert facts.parameters


def test_the_dtype_of_a_nested_text_config() -> None:
    config = Gemma3Config(text_config={**TEXT, "dtype": "bfloat16"}, vision_config={"hidden_size": 48})
    config.dtype = None
    assert facts_of(config).trained_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "pinned", "strict"),
    [
        (T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64), ("wo",), ()),
        (
            GptOssConfig(**TEXT, num_local_experts=2, num_experts_per_tok=1),
            ("input_layernorm", "norm", "post_attention_layernorm"),
            (),
        ),
        (llama(), (), ()),
    ],
)
def test_pins(config: Any, pinned: tuple[str, ...], strict: tuple[str, ...]) -> None:
    facts = facts_of(config)
    assert (facts.pinned, facts.pinned_strict) == (pinned, strict)


def test_pins_of_submodels() -> None:
    """Blip-2 does not pin `wo` of T5, but its language model does."""
    config = Blip2Config(
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 32,
        },
        qformer_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
        text_config={
            "model_type": "t5",
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 1,
            "vocab_size": 64,
        },
    )
    assert facts_of(config).pinned == ("qformer", "query_tokens", "wo")


def test_looking_changes_nothing() -> None:
    config = llama(torch.bfloat16)
    before, random = copy.deepcopy(config.to_dict()), torch.get_rng_state()
    facts_of(config)
    assert config.to_dict() == before
    assert config._attn_implementation == llama()._attn_implementation
    assert torch.equal(torch.get_rng_state(), random)


def test_seventy_billion_parameters_allocate_nothing() -> None:
    config = LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        dtype="bfloat16",
    )
    facts = facts_of(config)
    assert facts.parameters == 70_553_706_496
    assert facts.parameter_bytes == 2 * 70_553_706_496


def test_a_config_that_its_class_refuses() -> None:
    config = llama()
    config.hidden_act = "nope"
    assert message(config) == (
        "the config does not fit its model class\n"
        "  - LlamaConfig: LlamaForCausalLM fails with KeyError: 'nope'\n"
        "    expected  a config from which the class can be built\n"
        "    fix       use the config.json and the transformers version with which the checkpoint was published"
    )


@pytest.mark.newest  # Gemma 2 of older transformers takes sdpa
def test_an_attention_implementation_that_a_class_refuses() -> None:
    config, policy = Gemma2Config(num_hidden_layers=1), PrecisionPolicy(torch.float32, "float32")
    text = refused(CheckpointError, skeleton, config, policy, attn_implementation="sdpa")
    assert text.startswith(
        "the attention implementation cannot be used\n  - Gemma2ForCausalLM fails with ValueError"
    )
    assert text.endswith("fix       --attn_implementation eager")


# Quantized configs

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("said", "facts"),
    [
        (
            {
                **BNB,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": "float16",
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_quant_storage": "bfloat16",
            },
            QuantizationFacts("bitsandbytes", "nf4", torch.float16, True, torch.bfloat16),
        ),
        (BNB, QuantizationFacts("bitsandbytes", "fp4", None, False, None)),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "bnb_4bit_compute_dtype": "float32"},
            QuantizationFacts("bitsandbytes", "int8"),
        ),
        (
            BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            QuantizationFacts("bitsandbytes", "nf4", torch.float32, False, torch.uint8),
        ),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["router"]},
            QuantizationFacts("mxfp4", "mxfp4", experts="mxfp4"),
        ),
        ({"quant_method": "gptq", "bits": 8}, QuantizationFacts("gptq", "gptq-8bit")),
        ({"quant_method": "awq", "bits": 4}, QuantizationFacts("awq", "awq-4bit")),
        ({"quant_method": "fp8", "fmt": "e4m3"}, QuantizationFacts("fp8", "fp8")),
    ],
)
def test_how_a_config_says_it_is_quantized(said: Any, facts: QuantizationFacts) -> None:
    config = llama()
    config.quantization_config = said
    assert facts_of(config).quantization == facts


def test_a_quantization_with_a_dtype_that_does_not_exist() -> None:
    config = llama()
    config.quantization_config = {**BNB, "bnb_4bit_compute_dtype": "bfloat17"}
    assert message(config) == (
        "unknown dtype in the config\n"
        "  - bnb_4bit_compute_dtype is 'bfloat17'\n"
        "    expected  a torch dtype such as 'bfloat16'\n"
        "    fix       correct it in config.json"
    )


# Modules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_module(dtype: torch.dtype) -> None:
    model = LlamaForCausalLM(llama()).to(dtype)
    model.model.norm.float()
    facts = facts_of(model)
    parameters = sum(p.numel() for p in model.parameters())
    assert facts.trained_dtype == dtype
    assert facts.parameters == parameters
    assert facts.parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert (facts.source, facts.model_type) == ("LlamaForCausalLM", "llama")


def test_tied_weights_count_once() -> None:
    model = LlamaForCausalLM(llama(tie_word_embeddings=True))
    assert facts_of(model).parameters == facts_of(model.config).parameters


def test_a_module_without_a_config() -> None:
    class Net(nn.Module):
        _keep_in_fp32_modules_strict = ("norm",)

        def __init__(self) -> None:
            super().__init__()
            self.config = {"dtype": "whatever"}
            self.linear = nn.Linear(4, 4, bias=False, dtype=torch.float16)
            self.norm = nn.LayerNorm(2)

    assert facts_of(Net()) == ModelFacts(
        source="Net",
        trained_dtype=torch.float16,
        pinned_strict=("norm",),
        parameters=20,
        parameter_bytes=48,
    )


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, vocab_size=64))
    facts = facts_of(model)
    assert facts.pinned == ("wo",)
    assert facts.parameters == facts_of(model.config).parameters


def quantized(directory: Path, **options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(
        saved(directory), quantization_config=BitsAndBytesConfig(**options), dtype=torch.bfloat16
    )


NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": torch.bfloat16,
    "bnb_4bit_use_double_quant": True,
}


@pytest.mark.parametrize("double", [True, False])
def test_nf4_layers_and_their_checkpoint(tmp_path: Path, double: bool) -> None:
    model = quantized(tmp_path / "dense", **{**NF4, "bnb_4bit_use_double_quant": double})
    dense = facts_of(tmp_path / "dense")
    model.save_pretrained(tmp_path / "nf4")
    here, there = facts_of(model), facts_of(tmp_path / "nf4")
    for facts in (here, there):
        assert facts.quantization is not None
        assert facts.quantization == QuantizationFacts(
            "bitsandbytes", "nf4", torch.bfloat16, double, torch.uint8
        )
        assert facts.trained_dtype == torch.bfloat16
        assert facts.parameters == dense.parameters
    held = load_file(tmp_path / "nf4" / "model.safetensors")
    assert there.parameter_bytes == sum(tensor.nbytes for tensor in held.values())
    absmax = sum(tensor.nbytes for name, tensor in held.items() if name.endswith("absmax"))
    packed = sum(tensor.nbytes for name, tensor in held.items() if name.endswith("weight"))
    assert here.parameter_bytes == packed + absmax


def test_the_layers_know_better_than_the_config(tmp_path: Path) -> None:
    model = quantized(tmp_path, **NF4)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype = torch.float32
    facts = facts_of(model)
    assert facts.quantization is not None
    assert facts.quantization.compute_dtype == torch.float32


def test_int8_layers_and_their_checkpoint(tmp_path: Path) -> None:
    model = quantized(tmp_path / "dense", load_in_8bit=True)
    model.save_pretrained(tmp_path / "int8")
    for facts in (facts_of(model), facts_of(tmp_path / "int8")):
        assert facts.quantization is not None
        assert (facts.quantization.method, facts.quantization.format) == ("bitsandbytes", "int8")
        assert facts.parameters == facts_of(tmp_path / "dense").parameters
        assert facts.trained_dtype == torch.bfloat16


def test_int8_bytes_are_the_codes_and_the_row_scales_before_and_after_a_forward(tmp_path: Path) -> None:
    model = quantized(tmp_path / "dense", load_in_8bit=True)
    layers = [module for module in model.modules() if type(module).__name__ == "Linear8bitLt"]
    size = sum(layer.weight.numel() + 4 * layer.out_features for layer in layers)
    for _ in range(2):
        assert dict(weight_bytes(model))["int8"] == size
        assert facts_of(model).parameter_bytes == sum(each for _, each in weight_bytes(model))
        for layer in layers:  # The first forward moves the scales from the weight to the layer.
            if layer.weight.CB is not None:
                layer.init_8bit_state()


def test_mxfp4_headers(tmp_path: Path) -> None:
    """Blocks and scales in gpt-oss's layout: two weights per byte, one scale for 32 weights."""
    config = GptOssConfig(**TEXT, num_local_experts=2, num_experts_per_tok=1, dtype="bfloat16")
    saved(tmp_path, config=config)
    held = load_file(tmp_path / "model.safetensors")
    names = [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]
    assert names
    for name in names:
        experts, inputs, outputs = held.pop(name).shape
        held[f"{name}_blocks"] = torch.zeros(experts, outputs, inputs // 32, 16, dtype=torch.uint8)
        held[f"{name}_scales"] = torch.zeros(experts, outputs, inputs // 32, dtype=torch.uint8)
    save_file(held, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}})
    )
    facts = facts_of(tmp_path)
    assert facts.trained_dtype == torch.bfloat16
    assert facts.quantization == QuantizationFacts("mxfp4", "mxfp4", experts="mxfp4")


@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_a_peft_model_is_its_base_model(tmp_path: Path, base: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = quantized(tmp_path, **NF4) if base == "nf4" else LlamaForCausalLM(llama()).bfloat16()
    before = facts_of(model)
    lora = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]))
    assert facts_of(lora) == before


@takes_add_adapter
def test_an_adapter_added_by_transformers_is_left_out() -> None:
    from peft import LoraConfig

    model = LlamaForCausalLM(llama()).bfloat16()
    before = facts_of(model)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    assert facts_of(model) == before


# Directories


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_directory(tmp_path: Path, dtype: torch.dtype) -> None:
    facts = facts_of(saved(tmp_path, dtype))
    parameters = facts_of(llama()).parameters
    assert parameters is not None
    assert facts == ModelFacts(
        source=str(tmp_path),
        model_type="llama",
        trained_dtype=dtype,
        parameters=parameters,
        parameter_bytes=parameters * dtype.itemsize,
    )
    assert facts == facts_of(str(tmp_path))


def test_the_headers_know_better_than_the_config(tmp_path: Path) -> None:
    path = saved(tmp_path, torch.float16) / "config.json"
    path.write_text(path.read_text().replace("float16", "float32"))
    facts = facts_of(tmp_path)
    assert facts.trained_dtype == torch.float16


def test_shards_are_added_up(tmp_path: Path) -> None:
    whole = facts_of(saved(tmp_path / "whole"))
    parts = facts_of(saved(tmp_path / "parts", max_shard_size="40KB"))
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert replace(parts, source=whole.source) == whole


def test_float8_is_not_what_a_model_is_trained_in(tmp_path: Path) -> None:
    saved(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    scales = {f"{name}_scale": torch.ones(1) for name in held if name.endswith("proj.weight")}
    held = {n: t.to(torch.float8_e4m3fn) if f"{n}_scale" in scales else t for n, t in held.items()}
    save_file(held | scales, tmp_path / "model.safetensors")
    facts = facts_of(tmp_path)
    assert facts.trained_dtype == torch.bfloat16


def test_a_directory_without_weights(tmp_path: Path) -> None:
    llama(torch.bfloat16).save_pretrained(tmp_path)
    facts = facts_of(tmp_path)
    assert facts.trained_dtype == torch.bfloat16


def test_facts_can_be_sent_to_another_process(tmp_path: Path) -> None:
    facts = facts_of(saved(tmp_path))
    assert pickle.loads(pickle.dumps(facts)) == facts


def test_an_adapter_directory(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert message(tmp_path) == (
        "an adapter, not a model\n"
        f"  - the directory {tmp_path} holds adapter_config.json, adapter_model.safetensors\n"
        "    expected  the model that the adapter was trained on\n"
        "    fix       give owner/base"
    )


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert message(tmp_path) == (
        "not a checkpoint\n"
        f"  - the directory {tmp_path} holds notes.txt\n"
        "    expected  config.json and model.safetensors, or a .gguf file\n"
        "    fix       pass the directory that save_pretrained() wrote"
    )


def test_an_empty_directory(tmp_path: Path) -> None:
    assert f"the directory {tmp_path} holds nothing\n" in message(tmp_path)


@pytest.mark.parametrize(
    ("content", "headline", "given", "expected", "fix"),
    [
        (
            "{",
            "config.json is not JSON",
            "{0}: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
            "JSON",
            "correct the file, or copy or download it again",
        ),
        (
            "[]",
            "config.json is not an object",
            "{0}: a JSON list",
            "a JSON object",
            "correct the file, or copy or download it again",
        ),
        (
            "{}",
            "unknown model",
            "{0} has no model_type",
            f"a model_type that transformers {version} has",
            "add the model_type, or pass the directory that save_pretrained() wrote",
        ),
        (
            '{"model_type": "lama"}',
            "unknown model",
            "{0}: model_type 'lama'",
            f"a model_type that transformers {version} has",
            "did you mean llama or mllama or udop? Or update transformers",
        ),
        (
            '{"model_type": "zzzzzz"}',
            "unknown model",
            "{0}: model_type 'zzzzzz'",
            f"a model_type that transformers {version} has",
            "update transformers",
        ),
        (
            '{"model_type": "zzzzzz", "auto_map": {}}',
            "unknown model",
            "{0}: model_type 'zzzzzz'",
            f"a model_type that transformers {version} has",
            "isotype runs no code of a checkpoint, so load the model yourself and pass the nn.Module",
        ),
        (
            '{"model_type": "llama", "torch_dtype": "bfloat17"}',
            "unknown dtype in the config",
            "torch_dtype in {0} is 'bfloat17'",
            "a torch dtype such as 'bfloat16'",
            "correct it in config.json",
        ),
    ],
)
def test_a_config_json_that_cannot_be_used(
    tmp_path: Path, content: str, headline: str, given: str, expected: str, fix: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    found = message(tmp_path)
    near = fix.startswith("did you mean")
    start = f"{headline}\n  - {given.format(path)}\n    expected  {expected}\n    fix       "
    if near:  # Which other names are similar depends on transformers' version.
        assert found.startswith(f"{start}did you mean llama or ")
    else:
        assert found == start + fix


def test_a_config_json_with_values_of_the_wrong_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(CheckpointError) as caught:
        facts_of(tmp_path)
    assert caught.value.headline == "config.json cannot be read"
    assert "hidden_size" in caught.value.problems[0].given


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    saved(tmp_path)
    assert message(tmp_path / "model.safetensors") == (
        "not a model\n"
        f"  - the file {tmp_path}/model.safetensors\n"
        "    expected  a checkpoint directory or a .gguf file\n"
        f"    fix       give the directory {tmp_path}"
    )


def test_what_is_no_model_at_all() -> None:
    assert message(3) == (
        "neither a model nor a config\n"
        "  - a int\n"
        "    expected  an nn.Module, a transformers config, a path, embedded:NAME or a hub id\n"
        "    fix       give one of these"
    )


# GGUF


def write_gguf(path: Path, architecture: str, kind: str) -> Path:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture)
    weight = np.zeros((8, 64), dtype=np.float32)
    stored = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    writer.add_tensor("token_embd.weight", stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.add_tensor("output_norm.weight", np.zeros(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("directory", [True, False])
def test_a_quantized_gguf_file(tmp_path: Path, directory: bool) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", "Q8_0")
    assert facts_of(tmp_path if directory else path) == ModelFacts(
        source=str(path),
        model_type="llama",
        parameters=576,
        parameter_bytes=512 // 32 * 34 + 256,
    )


def test_a_gguf_file_of_floats(tmp_path: Path) -> None:
    facts = facts_of(write_gguf(tmp_path / "m.gguf", "gpt-oss", "BF16"))
    assert facts.model_type == "gpt_oss"
    assert facts.pinned == ("input_layernorm", "norm", "post_attention_layernorm")
    assert facts.trained_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("qwen2moe", "qwen2_moe"), ("qwen3", "qwen3"), ("gemma3", "gemma3_text"), ("qwen35", "qwen3_5_text")],
)
def test_names_of_architectures(tmp_path: Path, architecture: str, model_type: str) -> None:
    assert facts_of(write_gguf(tmp_path / "m.gguf", architecture, "F16")).model_type == model_type


def test_a_gguf_file_of_an_unknown_architecture(tmp_path: Path) -> None:
    facts = facts_of(write_gguf(tmp_path / "m.gguf", "plamo9", "F16"))
    assert (facts.model_type, facts.pinned) == ("plamo9", ())


# The hub, simulated by the test: there is no network here.


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate owner/name on the hub, with a config, and with nothing in the local cache."""
    directory = saved(tmp_path / "hub")
    config = AutoConfig.from_pretrained(directory)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: config)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    return directory


def test_a_hub_id_in_the_local_cache(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(hub / "config.json"))
    facts = facts_of("owner/name")
    assert facts.source == "owner/name"
    assert facts.trained_dtype == torch.bfloat16


def test_a_hub_id_by_its_headers(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

    shapes = {header.name: list(header.shape) for header in read_headers(hub).tensors}
    held = {name: TensorInfo("F16", shape, (0, 2 * math.prod(shape))) for name, shape in shapes.items()}
    answer = SafetensorsRepoMetadata(
        None,
        False,
        dict.fromkeys(held, "model.safetensors"),
        {"model.safetensors": SafetensorsFileMetadata({}, held)},
    )
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *_, **__: answer)
    facts = facts_of("owner/name")
    assert facts.trained_dtype == torch.float16
    assert facts.parameter_bytes == 2 * facts.parameters
    held.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in no file"):
        facts_of("owner/name")


def test_a_revision_reaches_every_question_to_the_hub(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = AutoConfig.from_pretrained(hub), []

    def answer_config(model_id: str, revision: str, **_: Any) -> Any:
        asked.append(revision)
        return config

    def answer_cache(model_id: str, file: str, revision: str | None) -> None:
        asked.append(revision)

    def answer_headers(model_id: str, revision: str | None) -> Any:
        asked.append(revision)
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(AutoConfig, "from_pretrained", answer_config)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", answer_cache)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", answer_headers)
    assert facts_of("owner/name", revision="v2").trained_dtype == torch.bfloat16
    assert asked == ["v2", "v2", "v2"]


def test_an_incomplete_cache_asks_the_hub(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub / "model.safetensors").unlink()
    saved(hub, max_shard_size="40KB")
    next(hub.glob("model-*.safetensors")).unlink()
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(hub / "config.json"))

    def offline(model_id: str, revision: str | None) -> Any:
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", offline)
    facts = facts_of("owner/name")
    assert facts.trained_dtype == torch.bfloat16


def test_pickles_on_the_hub_are_refused(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pickled(model_id: str, revision: str | None) -> Any:
        raise huggingface_hub.errors.NotASafetensorsRepoError("'owner/name' is not a safetensors repo.")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", pickled)
    assert message("owner/name") == (
        "no readable safetensors on the hub\n"
        "  - hub id owner/name: 'owner/name' is not a safetensors repo.\n"
        "    expected  weights in safetensors\n"
        "    fix       use a revision of the model that has safetensors, or convert the model; pickled weights are not read"
    )


@pytest.mark.parametrize(
    ("offline", "fix"),
    [
        (
            True,
            "connect to the network, so that isotype can search the hub, or give a local directory; "
            "HF_HUB_OFFLINE=1 uses the local cache without a wait",
        ),
        (False, "check the spelling; for a private or gated model, log in with `hf auth login`"),
    ],
)
def test_a_missing_network_is_no_misspelled_name(
    offline: bool, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("isotype.compat.hub._why_unreachable", lambda: "")

    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("We couldn't connect to 'https://huggingface.co'.\nCheck your connection.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    assert message("owner/name") == (
        "the model cannot be read from the hub\n"
        "  - hub id owner/name: We couldn't connect to 'https://huggingface.co'.\n"
        "    expected  a model on the hub (or in its local cache); no local path has this name either\n"
        f"    fix       {fix}"
    )
