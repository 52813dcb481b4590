from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import nn

import isotype
from isotype.trace.dtype_history import remembered

CONFIG = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64,
)  # fmt: skip


def loaded(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    return model


def codes(model: nn.Module) -> dict[str, str]:
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(1, 4, dtype=torch.long)}
    report = isotype.check(model, batch, verify=False, wiring=False)
    return {finding.code: finding.message for finding in report.errors}


def test_buffers_that_a_state_dict_lacks() -> None:
    """huggingface/transformers #45902: the frequencies of rotary positions are registered with persistent=False."""
    state = transformers.LlamaForCausalLM(CONFIG).state_dict()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(CONFIG)
    with remembered():
        loaded(model, state)
    names = "model.rotary_emb.inv_freq, model.rotary_emb.original_inv_freq"
    message = f"nothing has set the values of 2 buffers: {names}"
    report = isotype.check(
        model, {"input_ids": torch.ones(1, 4, dtype=torch.long)}, verify=False, wiring=False
    )
    (finding,) = report.errors
    assert (finding.code, finding.message) == ("IST504", message)
    assert finding.source.startswith(f"{Path(__file__).name}:")
    assert finding.phase == "load"


def test_values_that_were_set_after_to_empty() -> None:
    state = transformers.LlamaForCausalLM(CONFIG).state_dict()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(CONFIG)
    with remembered():
        loaded(model, state)
    rotary = transformers.LlamaForCausalLM(CONFIG).model.rotary_emb
    model.model.rotary_emb.inv_freq.copy_(rotary.inv_freq)
    model.model.rotary_emb.original_inv_freq = rotary.original_inv_freq
    assert codes(model) == {}


def test_weights_that_no_state_dict_has() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with remembered():
        model.to_empty(device="cpu")
    nn.init.normal_(model[0].weight.data)
    model[0].bias.data.zero_()
    report = isotype.check(model, {"input": torch.ones(2, 4)}, verify=False, wiring=False)
    assert [finding.message for finding in report.errors] == [
        "nothing has set the values of 2 weights: 1.weight, 1.bias"
    ]
