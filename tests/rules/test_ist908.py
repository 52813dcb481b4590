from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import isotype
from isotype.records.reach import NoReach
from isotype.rules.ist908_loss_of_a_step import find
from tests.rules.samples import reached

COUNT = NoReach("count", "num_items_in_batch")


@pytest.mark.parametrize(("accumulates", "severity"), [(4, "error"), (1, "note")])
def test_a_count_that_changes_no_loss(accumulates: int, severity: str) -> None:
    trace = reached(unused=(COUNT,))
    (finding,) = find(replace(trace, setup=replace(trace.setup, accumulates=accumulates)))
    assert finding.severity == severity
    assert finding.message.startswith("the loss ignores the number of labels in the step")


def test_other_inputs_are_another_rule() -> None:
    assert not list(find(reached(unused=(NoReach("input", "attention_mask"),))))


class Mine(LlamaForCausalLM):
    """A loss of one's own, and the count in `kwargs`."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = super().forward(input_ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("kind", [Mine, LlamaForCausalLM])
def test_a_trainer_that_accumulates(kind: type, tmp_path: Any) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    rows = [{"input_ids": list(range(4, 12)), "labels": list(range(4, 12))} for _ in range(4)]
    arguments = transformers.TrainingArguments(
        tmp_path, use_cpu=True, report_to="none", gradient_accumulation_steps=2, per_device_train_batch_size=2
    )
    trainer = transformers.Trainer(kind(config), arguments, train_dataset=rows)
    codes = [finding.code for finding in isotype.check(trainer).errors]
    assert codes == (["IST908"] if kind is Mine else [])
