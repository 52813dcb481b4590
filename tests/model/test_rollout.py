"""The memory of generated completions: as much as `generate` allocates, with folded layers and sliding windows too."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers

from isotype.model.repeated_layers import fold
from isotype.model.rollout import rollout
from isotype.preflight.check import check
from tests.allocations import peak_of
from tests.models import tiny_config
from tests.zoo.processors import tiny_vision_model
from tests.zoo.vision import MODELS, batch

ROWS, PROMPT, COMPLETION = 8, 40, 40
WIDE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "intermediate_size": 64,
}
"""The caches of all layers are larger than what one layer computes with."""
SLIDING = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 2}


def made(kind: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(tiny_config(kind, **{**WIDE, **sizes})).eval()


def allocated(model: Any) -> int:
    """Return the most bytes that `generate` allocates."""
    ids = torch.ones(ROWS, PROMPT, dtype=torch.long)
    settings = transformers.GenerationConfig(
        max_new_tokens=COMPLETION, do_sample=True, eos_token_id=None, pad_token_id=0
    )
    mask = torch.ones_like(ids)
    with torch.no_grad():
        return peak_of(lambda: model.generate(ids, attention_mask=mask, generation_config=settings))[0]


def foreseen(model: Any) -> int:
    prompts = torch.ones(ROWS, PROMPT, dtype=torch.long)
    generated = rollout({"input_ids": prompts, "attention_mask": prompts}, COMPLETION)
    ids = torch.ones(1, 4, dtype=torch.long)
    only: dict[str, Any] = {"optimizer": "sgd", "wiring": False, "verify": False}
    report = check(model, {"input_ids": ids, "labels": ids}, device="cpu", evaluation=generated, **only)
    peak = report.trace.memory.phases["rollout"]
    return peak["activations"] + peak["inputs"]


@pytest.mark.parametrize(
    ("kind", "sizes"), [("LlamaConfig", {}), ("Gemma3TextConfig", SLIDING)], ids=["full", "sliding"]
)
def test_a_rollout_takes_what_generate_allocates(kind: str, sizes: dict[str, Any]) -> None:
    assert foreseen(made(kind, **sizes)) == pytest.approx(allocated(made(kind, **sizes)), rel=0.05)


def test_folded_layers_keep_the_caches_of_the_layers_that_they_represent() -> None:
    folded = made("LlamaConfig", num_hidden_layers=6)
    fold(folded)
    assert len(folded.model.layers) < 6
    # The whole model copies the keys of the completion once more, in each layer.
    assert foreseen(folded) == pytest.approx(foreseen(made("LlamaConfig", num_hidden_layers=6)), rel=0.04)


def test_adapters_do_not_hide_that_generate_keeps_the_last_logits_alone() -> None:
    wide = {"vocab_size": 2048, "num_hidden_layers": 1}
    adapted = peft.get_peft_model(made("LlamaConfig", **wide), peft.LoraConfig(target_modules=["q_proj"]))
    assert foreseen(adapted.eval()) == pytest.approx(foreseen(made("LlamaConfig", **wide)), rel=0.1)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_positions_of_a_completion_after_an_image(name: str) -> None:
    """Qwen-VL derives positions from the image and the mask, for all tokens of the mask, if a forward gets no positions."""
    model = tiny_vision_model(name).train()
    inputs = batch(MODELS[name])
    prompts = {key: value for key, value in inputs.items() if key != "labels"}
    only: dict[str, Any] = {"optimizer": "sgd", "wiring": False, "verify": False}
    report = check(model, inputs, device="cpu", evaluation=rollout(prompts, 4), **only)
    assert report.trace.failure is None
    assert not report.errors
    assert "rollout" in report.trace.memory.phases
