from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import isotype
from isotype.compat.torch_fsdp import fake_process_group
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
    reach = measure_reach(model, seen, others=[seen, text_alone()], sharing="fsdp")
    assert reach is not None
    assert reach.skipped == ("model.multi_modal_projector", "model.vision_tower")
    assert reach.mismatch is not None
    assert (reach.mismatch.process, reach.mismatch.at) == (2, 1)
    step = replace(trace([weight()]), reach=reach)
    assert not list(find(step))
    (finding,) = find(replace(step, setup=replace(step.setup, fsdp=2)))
    assert "run model.multi_modal_projector, model.vision_tower:" in finding.message
    first, other = re.findall(r"gathers [\d,]+ numbers of ([\w.]+)", finding.notes[0])
    assert (first, other) == ("model.vision_tower.embeddings", "model.language_model.layers.0")
    alike = measure_reach(model, seen, others=[seen], sharing="fsdp")
    assert alike is not None
    assert (alike.skipped, alike.mismatch, alike.undecided) == ((), None, ())


def test_gradients_that_one_process_does_not_reduce() -> None:
    class Gated(torch.nn.Module):
        """A layer that always runs and whose result is used for some batches alone."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(32, 8)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
            self.head = torch.nn.Linear(8, 32)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.layers[0](self.embed(input_ids))
            more = self.layers[1](hidden)
            logits = self.head(hidden + more if bool((input_ids > 20).any()) else hidden)
            return {
                "loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
                "logits": logits,
            }

    few, many = torch.arange(16).view(2, 8), torch.arange(16).view(2, 8) + 10
    batches = [{"input_ids": ids, "labels": ids} for ids in (few, many)]
    reach = measure_reach(Gated(), batches[0], others=batches[1:], sharing="fsdp")
    assert reach is not None
    assert reach.skipped == ()
    assert reach.mismatch is not None
    assert (reach.mismatch.first, reach.mismatch.other) != (None, None)
    step = replace(trace([weight()], fsdp=2), reach=reach)
    (finding,) = find(step)
    assert finding.message.startswith("the gradients of different batches reach different modules:")


def test_a_measurement_leaves_no_process_group_and_no_hook() -> None:
    hook = sys.excepthook
    measure_reach(SEES.build(FP32), SEES.batch(), others=[text_alone()], sharing="fsdp")
    assert not torch.distributed.is_initialized()
    assert sys.excepthook is hook


def test_a_process_with_a_process_group_says_which_modules_are_skipped() -> None:
    with fake_process_group(2):
        reach = measure_reach(SEES.build(FP32), SEES.batch(), others=[text_alone()], sharing="fsdp")
    assert reach is not None
    assert reach.mismatch is None
    assert reach.skipped == ("model.multi_modal_projector", "model.vision_tower")


def test_experts_that_a_batch_does_not_hit_are_gathered_with_their_layer() -> None:
    mixtral = ARCHITECTURES["qwen3_moe"]
    model, batch = mixtral.build(FP32), mixtral.batch()
    other = {name: value.roll(3, -1) for name, value in batch.items()}
    reach = measure_reach(model, batch, others=[other], sharing="fsdp")
    assert reach is not None
    assert (reach.skipped, reach.mismatch, reach.undecided) == ((), None, ())


class Rows(torch.utils.data.Dataset[Any]):
    """Rows that are batches already."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return self.batches[at]


@pytest.mark.parametrize(
    ("fsdp", "mixed"),
    [
        ("full_shard", True),
        pytest.param("full_shard", False, marks=pytest.mark.exhaustive),  # modules that one batch skips
        pytest.param("", True, marks=pytest.mark.exhaustive),  # as the step above without fsdp
        pytest.param("", False, marks=pytest.mark.exhaustive),
    ],
)
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
    codes = [
        finding.code
        for finding in isotype.check(trainer, phases=("forward", "backward"), verify=False).errors
    ]
    assert codes == (["IST703"] if fsdp and mixed else [])
