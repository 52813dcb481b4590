from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import isotype
from isotype.rules.ist703_skipped_modules import find
from isotype.trace.reach.measure import measure_reach
from tests.rules.samples import FP32, trace, weight
from tests.zoo import ARCHITECTURES

SEES = ARCHITECTURES["gemma3-vl"]


def text_alone() -> dict[str, torch.Tensor]:
    batch = SEES.batch()
    ids = batch["input_ids"].where(batch["input_ids"] < 120, 7)
    return {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }


def test_modules_that_one_batch_skips() -> None:
    model, seen = SEES.build(FP32), SEES.batch()
    reach = measure_reach(model, seen, others=[seen, text_alone()])
    assert reach is not None
    assert reach.skipped == ("model.multi_modal_projector", "model.vision_tower")
    step = replace(trace([weight()]), reach=reach)
    assert not list(find(step))
    (finding,) = find(replace(step, setup=replace(step.setup, fsdp=2)))
    assert "run model.multi_modal_projector, model.vision_tower:" in finding.message
    alike = measure_reach(model, seen, others=[seen])
    assert alike is not None
    assert alike.skipped == ()


def test_experts_that_a_batch_does_not_hit_are_gathered_with_their_layer() -> None:
    mixtral = ARCHITECTURES["qwen3_moe"]
    model, batch = mixtral.build(FP32), mixtral.batch()
    other = {name: value.roll(3, -1) for name, value in batch.items()}
    reach = measure_reach(model, batch, others=[other])
    assert reach is not None
    assert reach.skipped == ()


class Rows(torch.utils.data.Dataset[Any]):
    """Rows that are batches already."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return self.batches[at]


@pytest.mark.parametrize("fsdp", ["full_shard", ""])
@pytest.mark.parametrize("mixed", [True, False])
def test_a_trainer_of_rows_with_and_without_pictures(fsdp: str, mixed: bool, tmp_path: Path) -> None:
    data = [SEES.batch(), text_alone() if mixed else SEES.batch()]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=1,
        report_to="none",
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = transformers.Trainer(
        SEES.build(FP32), arguments, train_dataset=Rows(data), data_collator=lambda rows: rows[0]
    )
    arguments.fsdp = fsdp  # a laptop has one process, which transformers does not shard
    codes = [finding.code for finding in isotype.check(trainer, verify=False).errors]
    assert codes == (["IST703"] if fsdp and mixed else [])
