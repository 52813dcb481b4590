"""Steps that could not be traced once, and errors that come of another one."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

import isotype
from tests.corpus.cases.crashes_parts import lora, nf4
from tests.models import one_layer, tiny_batch, tiny_model
from tests.reality import real_step

BF16 = torch.bfloat16


def test_dora_on_packed_weights() -> None:
    model = lora(nf4(one_layer(tiny_model("llama", BF16)), BF16), ["q_proj"], use_dora=True)
    report = isotype.check(
        model, tiny_batch("llama"), autocast=BF16, device="a100", wiring=False, verify=False
    )
    assert report.complete
    assert report.ok


def test_a_check_for_infinities() -> None:
    sizes = {"r": 2, "num_vectors": 8, "vector_length": 16}
    config = peft.VBLoRAConfig(**sizes, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(one_layer(tiny_model("llama")), config)
    assert isotype.check(model, tiny_batch("llama"), device="cpu", wiring=False, verify=False).complete


@pytest.mark.real_cpu
def test_a_frozen_part_of_an_adapter_that_was_left_behind() -> None:
    config = peft.VeraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(one_layer(tiny_model("llama", BF16)), config)
    assert isotype.check(model, tiny_batch("llama"), device="cpu", wiring=False, verify=False).ok
    for name, buffer in model.named_buffers():
        if "vera" in name:
            buffer.data = buffer.data.to(BF16)
    report = isotype.check(model, tiny_batch("llama"), device="cpu", wiring=False)
    (finding,) = report.errors
    assert finding.code == "IST102"
    assert finding.cause.endswith("vera_A.default is bfloat16")
    assert (finding.fixes[0].safety, finding.fixes[0].verified) == ("safe", True)
    isotype.repair(model, report)
    assert real_step(model, tiny_batch("llama")).error is None


class Stream(nn.Module):
    """Casts back to the dtype of its stream, which the embedding decides."""

    def __init__(self, made: torch.dtype | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.first, self.second = nn.Linear(8, 8, dtype=BF16), nn.Linear(8, 8, dtype=BF16)
        self.made = made

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return self.second(self.first(hidden).to(self.made or hidden.dtype))


def test_what_takes_a_tensors_dtype_fails_for_the_same_cause() -> None:
    (finding,) = isotype.check(Stream(), {"ids": torch.arange(4)}, device="cpu").errors
    assert finding.cause == "embed.weight is float32"
    assert finding.places == ("first", "second")
    assert "1 more operator in 2 modules fails for the same cause" in finding.notes


def test_two_errors_of_their_own() -> None:
    errors = isotype.check(Stream(torch.float32), {"ids": torch.arange(4)}, device="cpu").errors
    assert len(errors) == 2
