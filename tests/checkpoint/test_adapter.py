"""`isotype.load` of an adapter's folder, and of a model without a policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import isotype
from isotype.checkpoint.adapter import load_for_inference
from isotype.core.errors import CheckpointError
from tests.adapters import save_trained
from tests.zoo import ARCHITECTURES

IDS = torch.arange(1, 13).reshape(2, 6)


@pytest.fixture
def base(saved: Callable[..., Path]) -> Path:
    return saved("llama")


def trained(base: Path, directory: Path, storage: str | None, **lora: Any) -> Path:
    policy = isotype.resolve_precision(base, "float32", storage, "cpu")
    return save_trained(
        isotype.add_lora(isotype.load(base, policy), policy, r=4, **lora), directory, scale=0.05
    )


@pytest.mark.parametrize("storage", [None, "nf4"])
def test_an_adapter_is_a_peft_model_on_its_base(base: Path, tmp_path: Path, storage: str | None) -> None:
    adapter = trained(base, tmp_path / "run", storage)
    model = isotype.load(adapter)
    assert isinstance(model, peft.PeftModel)
    assert not model.training
    assert model.precision_policy.storage == (storage or "float32")
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    with torch.no_grad():
        logits = model(IDS).logits
        if storage is None:  # PEFT reads the same files
            plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            expected = peft.PeftModel.from_pretrained(plain, adapter).eval()(IDS).logits
        else:
            expected = load_for_inference(adapter)[0](IDS).logits
    assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)  # sums in another order
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.exhaustive
def test_a_base_whose_class_has_no_auto_class(tmp_path: Path) -> None:
    """AutoModelForSeq2SeqLM has no class for the config of InstructBLIP."""
    model: Any = ARCHITECTURES["instructblip-vl"].build(torch.float32)
    model.save_pretrained(tmp_path / "base")
    adapter = trained(tmp_path / "base", tmp_path / "run", None, target_modules=["qkv"])
    assert isinstance(isotype.load(adapter).get_base_model(), type(model))


def test_an_adapter_under_another_policy(base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "run", "nf4")
    policy = isotype.resolve_precision(base, "bfloat16", device="cpu")
    model = isotype.load(adapter, policy, attn_implementation="eager")
    layer = model.get_base_model().model.layers[0].self_attn.q_proj.get_base_layer()
    assert layer.weight.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


def test_an_adapter_without_its_base(base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "run", None)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
    for policy in (None, isotype.resolve_precision(base, "float32", device="cpu")):
        with pytest.raises(CheckpointError, match="the adapter names no base model"):
            isotype.load(adapter, policy)


def test_a_model_without_a_policy_takes_the_one_it_was_saved_with(base: Path, tmp_path: Path) -> None:
    model = isotype.load(base)
    default = isotype.resolve_precision(base)
    assert (model.precision_policy.compute, model.precision_policy.storage) == (
        default.compute,
        default.storage,
    )
    chosen = isotype.resolve_precision(base, "bfloat16", device="cpu")
    isotype.load(base, chosen).save_pretrained(tmp_path / "model")
    chosen.save(tmp_path / "model")
    assert isotype.load(tmp_path / "model").precision_policy.compute == torch.bfloat16
