"""Tensors that a model does not have: an error, unless they are known to be unnecessary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import isotype
from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.cli.main import main
from isotype.core.errors import CheckpointError
from tests.checkpoint.test_gguf import write_gguf
from tests.checkpoint.test_quantized import checkpoint
from tests.models import quiet, save_tiny
from tests.refusals import commands_on, refused
from tests.zoo import ARCHITECTURES

Change = Callable[[dict[str, torch.Tensor]], None]


def one_layer_more(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name.replace(".layers.1.", ".layers.2.")] = tensors[name].clone()


def added(*names: str, shape: tuple[int, ...] = (2,)) -> Change:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=torch.bfloat16) for name in names})


def test_a_layer_more_than_its_config_is_refused_by_every_command(tmp_path: Path, capsys: Any) -> None:
    path = checkpoint(tmp_path / "model", one_layer_more)
    for command in commands_on(path, tmp_path):
        assert main(command) == 2
        text = capsys.readouterr().err
        assert f"{path} holds tensors that LlamaForCausalLM does not have" in text
        assert "model.layers.2.mlp.up_proj.weight of shape [96, 64] in model.safetensors" in text
    assert not (tmp_path / "out").exists()
    policy = isotype.PrecisionPolicy(torch.float32, "float32")
    assert "holds tensors that LlamaForCausalLM does not have" in refused(
        CheckpointError, isotype.load, path, policy
    )


_WRAPPED = "remove `{}.`, which a wrapper of the model added, from the names in the file"


@pytest.mark.parametrize(
    ("before", "after", "fix"),
    [
        (r"^", "module.", _WRAPPED.format("module")),
        (r"^", "_orig_mod.", _WRAPPED.format("_orig_mod")),  # karpathy/nanoGPT #325
        (r"(layers\.\d+\.)", r"\1_orig_module.", _WRAPPED.format("_orig_module")),  # transformers #29659
        (r"^", "_fsdp_wrapped_module.", _WRAPPED.format("_fsdp_wrapped_module")),
        (r"^", "base_model.model.", "merge_and_unload()"),
        (r"(q_proj)", r"\1.base_layer", "merge_and_unload()"),  # OpenGVLab/InternVL #525
    ],
)
def test_names_that_a_wrapper_has_changed(tmp_path: Path, before: str, after: str, fix: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        renamed = {re.sub(before, after, name): value for name, value in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    path = checkpoint(tmp_path / "model", change)
    policy = isotype.PrecisionPolicy(torch.float32, "float32")
    text = refused(CheckpointError, isotype.load, path, policy)
    assert f"{path} does not hold the weights of LlamaForCausalLM" in text
    assert fix in text


@pytest.mark.parametrize(
    "name",
    [
        *(
            "model.layers.0.self_attn.q_proj.bias",
            "model.extra.weight",
            "v_head.summary.weight",
            "adapter.weight",
        ),
        *(
            "model.layers.0.self_attn.k_norm.weight",
            "model.layers.7.mtp_block.x",
            "model.embed_tokens_2.weight",
        ),
        *("model.layers.0.self_attn.k_scale", "model.layers.0.mlp.up_proj.pre_quant_scale"),
    ],
)
def test_an_unknown_tensor_is_refused(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path, added(name))
    text = refused(CheckpointError, open_checkpoint, path)
    assert f"- {name} of shape [2] in model.safetensors, which LlamaForCausalLM does not use" in text


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),  # saved by older versions, computed now
        ("llama", "model.rotary_emb.inv_freq"),
        ("llama", "score.weight"),  # the head of another class of the same model
        ("llama", "mtp.layers.0.eh_proj.weight"),  # transformers has no class for multi-token prediction
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "h.1.attn.masked_bias"),
    ],
)
def test_what_is_known_to_mean_nothing_is_left_out(tmp_path: Path, model: str, name: str) -> None:
    shape = (1, 1, 8, 8) if "attn.bias" in name else ()
    path = checkpoint(tmp_path, added(name, shape=shape), model=model)
    assert isotype.load(path, isotype.resolve_precision(path, "float32", device="cpu"))


def test_what_bert_was_published_with_is_left_out(tmp_path: Path) -> None:
    """bert-base-uncased names BertForMaskedLM, and also has the parts of BertForPreTraining."""
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    with quiet():
        transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with quiet():
        assert open_checkpoint(tmp_path).facts.model_type == "bert"


def test_layers_that_predict_ahead_are_those_that_the_config_names(tmp_path: Path) -> None:
    with quiet():
        ARCHITECTURES["deepseek_v3"].build(torch.float32).save_pretrained(tmp_path)  # type: ignore[operator]
    tensors = load_file(tmp_path / "model.safetensors")
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    for layer, known in ((layers, False), (61, True)):
        more = tensors | {f"model.layers.{layer}.eh_proj.weight": torch.ones(2)}
        save_file(more, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if known:
            open_checkpoint(tmp_path)
        else:
            assert "eh_proj.weight of shape [2]" in refused(CheckpointError, open_checkpoint, tmp_path)


def test_scales_of_a_cache_are_known_where_the_config_has_one(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(2) for kind in "kv"]
    config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    open_checkpoint(checkpoint(tmp_path / "named", added(*names), config))
    text = refused(
        CheckpointError,
        open_checkpoint,
        checkpoint(tmp_path / "not", added(*names), config | {"kv_cache_scheme": None}),
    )
    assert "model.layers.*.self_attn.k_scale (2 tensors) of shape [2]" in text


@pytest.mark.parametrize("more", [False, True])
def test_another_class_leaves_out_parts_but_no_layer(tmp_path: Path, more: bool) -> None:
    path = save_tiny("llama", tmp_path, torch.bfloat16)
    policy = isotype.resolve_precision(path, "float32", device="cpu")
    if more:
        tensors = load_file(path / "model.safetensors")
        one_layer_more(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    auto = transformers.AutoModelForSequenceClassification
    content = json.loads((path / "config.json").read_text())
    if not more:
        assert isotype.load(path, policy, model_class=auto, num_labels=1).score.weight.shape == (1, 64)
        return
    (path / "config.json").write_text(json.dumps(content | {"architectures": ["LlamaForEverything"]}))
    text = refused(CheckpointError, isotype.load, path, policy, model_class=auto, num_labels=1)
    assert "model.layers.2.mlp.up_proj.weight of shape [96, 64]" in text
    assert "lm_head" not in text


@pytest.mark.parametrize(("name", "known"), [("rope_freqs.weight", True), ("blk.2.attn_q.weight", False)])
def test_of_a_gguf_file(tmp_path: Path, name: str, known: bool) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "more.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, torch.ones(8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["inspect", str(tmp_path / "more.gguf")]) == (0 if known else 2)
