"""Adapters of experts on every storage of the base: in plain PEFT, merged in plain transformers, and in GGUF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import isotype
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.merge.merge import merge_adapter
from isotype.checkpoint.tokenizer import tokenizer_copy
from isotype.checkpoint.values import dequantize
from isotype.core.errors import UsageError
from tests.adapters import save_trained
from tests.checkpoint.test_gguf_export import byte_level
from tests.checkpoint.test_load import mxfp4_checkpoint
from tests.models import CONFIGS, quiet, save_tiny, tiny_batch, tiny_config
from tests.pairwise import few
from tests.zoo import ARCHITECTURES

Saved = Callable[..., Path]
BASES = [
    ("qwen3-moe", None),
    ("qwen3-moe", "nf4"),
    ("qwen3-moe", "int8"),
    ("gpt-oss", "mxfp4"),
    ("gpt-oss", "nf4"),
]


def trained(base: Path, storage: str | None, adapter: Path) -> Any:
    """Save a float32 base with trained adapters on attention and experts."""
    policy = isotype.resolve_precision(base, "float32", storage, device="cpu")
    model = isotype.add_lora(isotype.load(base, policy), policy, r=4)
    assert any("experts" in name for name, value in model.named_parameters() if value.requires_grad)
    save_trained(model, adapter)
    isotype.fuse(model)
    return model.eval()


def logits(model: Any, name: str) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**tiny_batch(name)).logits
        return result


def opened(path: Path, **settings: Any) -> Any:
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **settings).eval()


@few("name, storage", BASES, ("qwen3-moe", "nf4"), ("gpt-oss", "mxfp4"))
def test_plain_libraries_compute_the_same(
    saved: Saved, tmp_path: Path, name: str, storage: str | None
) -> None:
    base = saved(name) if name == "qwen3-moe" else mxfp4_checkpoint(tmp_path / "base")[0]
    model = trained(base, storage, tmp_path / "adapter")
    expected = logits(model, name)

    merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    plain = opened(tmp_path / "merged")
    assert not hasattr(plain.config, "quantization_config")
    assert (logits(plain, name) - expected).abs().max() < 1e-5

    own = isotype.load(base, isotype.resolve_precision(base, "float32", storage, device="cpu"))
    dequantize(own, torch.float32)
    dense = opened(base).float()  # transformers 5.20 opens dequantized mxfp4 in bfloat16
    dense.load_state_dict(own.state_dict())
    with_adapter = peft.PeftModel.from_pretrained(dense, tmp_path / "adapter").eval()
    assert (logits(with_adapter, name) - expected).abs().max() < 1e-5


def test_experts_whose_files_have_another_shape(tmp_path: Path) -> None:
    """transformers compares a file's experts with the model's parameter of this name: adapters give it another name."""
    architecture = ARCHITECTURES["qwen3_vl_moe-vl"]
    base: Any = architecture.build(torch.float32)
    base.save_pretrained(tmp_path / "base")
    model = trained(tmp_path / "base", None, tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    plain = type(base).from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        result, expected = (merged(**architecture.batch()).logits for merged in (plain, model))
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("every_format")
def test_experts_trained_in_float16_are_compared_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetMoE multiplies by each expert's weight on its own, which torch refuses for two dtypes."""
    sizes = {"kv_channels": 8, "num_local_experts": 4, "vocab_size": 384}
    monkeypatch.setitem(CONFIGS, "jetmoe", lambda: tiny_config("JetMoeConfig", **sizes))
    base = save_tiny("jetmoe", tmp_path / "base")
    byte_level().save_pretrained(base)
    policy = isotype.resolve_precision(base, "float16", "nf4", device="cpu")
    save_trained(isotype.add_lora(isotype.load(base, policy), policy, r=4), tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    assert report.logits is not None
    assert report.logits.max_abs < 1e-5
    assert report.cheapest is not None
    assert "--quantization" not in str(report.cheapest)


def test_plain_peft_reads_the_file_on_a_base_that_transformers_quantizes(
    saved: Saved, tmp_path: Path
) -> None:
    trained(saved("qwen3-moe"), "nf4", tmp_path / "adapter")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = opened(saved("qwen3-moe"), quantization_config=config)
    held = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert held.keys() == file.keys()
    assert all(torch.equal(held[name], value) for name, value in file.items())


def test_experts_are_not_merged_into_a_format_that_transformers_does_not_read(
    saved: Saved, tmp_path: Path
) -> None:
    trained(saved("qwen3-moe"), None, tmp_path / "adapter")
    for stored in ("nf4", "int8"):
        with pytest.raises(UsageError, match=f"experts cannot be merged into {stored}"):
            merge_adapter(tmp_path / "adapter", tmp_path / "merged", stored=stored)


def test_a_merged_mixture_in_gguf_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    sizes |= {"moe_intermediate_size": 32, "vocab_size": 384}
    monkeypatch.setitem(CONFIGS, "mixture", lambda: tiny_config("Qwen3MoeConfig", **sizes))
    base = save_tiny("mixture", tmp_path / "base")
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(base)
    expected = logits(trained(base, None, tmp_path / "adapter"), "mixture")
    merge_adapter(tmp_path / "adapter", tmp_path / "model.gguf", stored="f32")
    policy = isotype.resolve_precision(tmp_path / "model.gguf", "float32", device="cpu")
    again = isotype.load(tmp_path / "model.gguf", policy)
    words = transformers.AutoTokenizer.from_pretrained(tokenizer_copy(read_headers(tmp_path / "model.gguf")))
    assert words.chat_template == tokenizer.chat_template
    assert again.config.moe_intermediate_size == 32
    assert (logits(again, "mixture") - expected).abs().max() < 1e-5
