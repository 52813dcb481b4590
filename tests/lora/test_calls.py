"""How much Python a fused layer runs: what a step of few tokens takes on a GPU, whose kernels are launched one by one."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import isotype

LAYERS = 2


def calls_of_a_step(model: Any) -> Counter[str]:
    """Calls of functions of isotype's own in the layers of a model, forward and backward, once all is known of them."""
    ids = torch.arange(2 * 64).view(2, 64) % 64
    folder, calls = str(Path(isotype.__file__).parent), Counter[str]()

    def seen(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            calls[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1

    def step() -> None:
        model(input_ids=ids, use_cache=False).last_hidden_state.square().mean().backward()

    step()
    sys.setprofile(seen)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def test_calls_of_a_layer() -> None:
    """915 of a layer by compiled loops and attention in strips, 862 with torch's attention, 680 by torch's operators in Python 3.11, whose comprehensions are calls; before they were counted, 1302."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(LlamaForCausalLM(config), adapters)
    isotype.fuse(model)
    calls = calls_of_a_step(model.train().get_base_model().model)
    assert 100 < calls.total() / LAYERS < 950, calls.most_common(20)
