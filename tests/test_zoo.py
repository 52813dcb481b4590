"""A sample of the zoo runs a real step; the whole of it does in `benchmarks/agreement.py`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers.models.auto import modeling_auto

from tests.reality import loss_of
from tests.zoo import ARCHITECTURES, LEFT_OUT

SAMPLE = (
    *("llama", "gpt2", "qwen3_moe", "jamba", "rwkv", "gemma4_text"),
    *("llava-vl", "qwen2_vl-vl", "mllama-vl", "bert-cls", "t5-s2s", "whisper-s2s"),
)


def test_the_zoo_is_large_and_has_every_family() -> None:
    families = Counter(architecture.family for architecture in ARCHITECTURES.values())
    assert sum(families.values()) >= 120
    assert families["causal"] >= 131
    assert families["vision-language"] >= 12
    assert families["classification"] >= 10
    assert families["encoder-decoder"] >= 6


def test_every_causal_model_of_transformers_is_an_entry_or_left_out_for_a_reason() -> None:
    known = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    entries = {name for name, architecture in ARCHITECTURES.items() if architecture.family == "causal"}
    assert entries | set(LEFT_OUT) == known
    assert not entries & set(LEFT_OUT)
    assert all(LEFT_OUT.values())


@pytest.mark.parametrize("name", SAMPLE)
def test_a_real_step_runs_in_float32(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build(torch.float32)
    loss = loss_of(model(**architecture.batch()))
    assert torch.isfinite(loss)
    loss.backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_is_built_as_it_would_be_loaded(dtype: torch.dtype) -> None:
    llama = ARCHITECTURES["llama"].build(dtype)
    assert {parameter.dtype for parameter in llama.parameters()} == {dtype}
    assert llama.training
    pinned = dict(ARCHITECTURES["t5-s2s"].build(dtype).named_parameters())
    kept = torch.float32 if dtype == torch.float16 else dtype
    assert pinned["encoder.block.0.layer.1.DenseReluDense.wo.weight"].dtype == kept
    assert pinned["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"].dtype == dtype


def test_float_inputs_take_the_asked_dtype_and_batches_repeat() -> None:
    batch = ARCHITECTURES["llava-vl"].batch
    assert batch(rows=3, dtype=torch.bfloat16)["pixel_values"].dtype == torch.bfloat16
    assert batch(rows=3)["input_ids"].shape[0] == 3
    assert all(torch.equal(value, batch()[name]) for name, value in batch().items())


def test_building_twice_gives_the_same_weights_and_leaves_the_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    architecture = ARCHITECTURES["llama"]
    first, second = architecture.build(torch.float32), architecture.build(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(loss_of(first(**architecture.batch())), loss_of(second(**architecture.batch())))
