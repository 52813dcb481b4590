"""Damaged or hostile files are refused by name before weights are read, in bounded time and memory."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isotype.checkpoint.checkpoint import open_checkpoint, open_model
from isotype.checkpoint.formats import tensor
from isotype.checkpoint.formats.config import read_config
from isotype.checkpoint.formats.gguf import without_vocabulary
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.core.errors import CheckpointError
from tests.train.tiny import save_chat_model


@pytest.fixture
def model(tmp_path) -> Path:
    return save_chat_model(tmp_path / "model")


def with_entries(path: Path, **entries: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **entries}))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"num_attention_heads": 0}, "by zero"),
        ({"architectures": [5]}, "architectures is [5]"),
        ({"architectures": "LlamaForCausalLM"}, "expected  a list of class names"),
        ({"load_in_4bit": "yes"}, "load_in_4bit is 'yes'\n    expected  true or false"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": "yes"}},
            "load_in_4bit is 'yes'",
        ),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100000\n    expected  a number of at most 2000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 1000}, "num_hidden_layers 1000\n    expected  at most 12, the number of tensors in the weights"),
        ({"attention_dropout": -5}, "attention_dropout is -5\n    expected  a number from 0 to 1"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"return_dict": False}, "return_dict is False"),
        ({"output_hidden_states": "x"}, "output_hidden_states is 'x'"),
        ({"get_text_config": 5}, "get_text_config hides a method of LlamaConfig"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 63}, "63"),
        ({"attn_implementation": "someone/kernel"}, "code from the hub is not run"),
    ],
)  # fmt: skip
def test_config(model, entries, words):
    with_entries(model / "config.json", **entries)
    begin = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(model)
    assert words in str(error.value)
    assert str(model) in str(error.value)
    assert time.monotonic() - begin < 20


def test_all_of_a_config_at_once(model):
    with_entries(model / "config.json", architectures=[5], attention_dropout=7)
    (model / "generation_config.json").write_text('{"max_new_tokens": -1}')
    with pytest.raises(CheckpointError) as error:
        read_config(model)
    assert len(error.value.problems) == 3


def test_a_config_of_more_modules_than_a_model_has(tmp_path):
    config = {"model_type": "mixtral", "num_hidden_layers": 1999, "hidden_size": 64, "num_attention_heads": 4}
    vision = {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 1999,
        "hidden_size": 64,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": config, "vision_config": vision})
    )
    from isotype.checkpoint.formats import config as formats

    limit = formats._MAX_MODULES
    formats._MAX_MODULES = 2000
    try:
        with pytest.raises(CheckpointError, match="more than 2,000 modules"):
            open_model(tmp_path / "config.json")
    finally:
        formats._MAX_MODULES = limit


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "generation_config.json: a JSON list"),
        ("{", "generation_config.json is not JSON"),
        ('{"max_new_tokens": -1}', "max_new_tokens"),
        ('{"eos_token_id": "x"}', "eos_token_id is 'x'\n    expected  token ids"),
        (f'{{"pad_token_id": {10**19}}}', "pad_token_id is 10000000000000000000"),
        ('{"output_hidden_states": []}', "output_hidden_states is []"),
        ('{"min_length": "0"}', "min_length is '0'\n    expected  a number"),
        ('{"bad_words_ids": "x"}', "expected  lists of token ids"),
    ],
)
def test_generation_config(model, text, words):
    (model / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(model)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tokenizer_config.json", "[]", "tokenizer_config.json: a JSON list"),
        ("tokenizer_config.json", '{"model_max_length": "abc"}', "model_max_length is 'abc'\n    expected  a number of tokens"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is 5"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', "tokenizer_class is 5"),
        ("tokenizer_config.json", '{"processor_class": "pipeline"}', "the tokenizer cannot be read"),
        ("tokenizer.json", '{"model": 5}', "the tokenizer cannot be read"),
        ("special_tokens_map.json", "[]", "special_tokens_map.json: a JSON list"),
    ],
)  # fmt: skip
def test_tokenizer(model, file, text, words):
    (model / file).write_text(text)
    with pytest.raises(CheckpointError) as error:
        tokenizer_of(model)
    assert words in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_weights_that_are_no_real_numbers(model, dtype):
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"stored as .*, which is not a dtype of weights"):
        open_checkpoint(model)


def gguf(entries: list[bytes]) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries) + bytes(64)


def test_an_architecture_that_is_a_number(tmp_path):
    key = b"general.architecture"
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf([struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 7)]))
    with pytest.raises(CheckpointError, match=r"general\.architecture 7"):
        read_headers(path)


@pytest.mark.parametrize("alignment", [0, 24, 0xD9E00799])
def test_an_alignment_that_ggml_refuses(tmp_path, alignment):
    key = b"general.alignment"
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf([struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, alignment)]))
    with pytest.raises(CheckpointError, match=rf"general\.alignment {alignment}\n +expected  a power of two"):
        read_headers(path)


def test_an_array_that_ends_after_the_file(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf([struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, 4, 1 << 60)]))
    with pytest.raises(CheckpointError, match="the header is longer than the file"):
        read_headers(path)


def test_a_large_alignment_makes_no_large_file(tmp_path):
    key = b"general.alignment"
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf([struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 1 << 31)]))
    assert len(without_vocabulary(path, ())) < 100


def test_more_tensors_than_a_model_has(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor, "MAX_TENSORS", 2_000)
    header = json.dumps(
        {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(2_001)}
    )
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(CheckpointError, match="2,001 tensors"):
        read_headers(tmp_path)
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(64))
    with pytest.raises(CheckpointError, match="tensors"):
        read_headers(path)
    index = {"metadata": {}, "weight_map": {f"t{i}": "a.safetensors" for i in range(2_001)}}
    (tmp_path / "b.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="2,001 tensors"):
        read_headers(tmp_path / "b.safetensors.index.json")
