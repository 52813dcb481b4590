from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.rules.traces import BF16, FP32, batch, found, llama, traced

RULE = "ist204_output_copies"


class Float32Outputs(nn.Module):
    """What `Accelerator.prepare` makes of a model: every output is cast after the loss is there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
        output = self.model(**inputs)
        return {"loss": output.loss, "logits": output.logits.float()}


def chunked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    pieces = zip(logits.flatten(0, 1).split(8), targets.flatten().split(8), strict=True)
    return torch.stack([nn.functional.cross_entropy(rows.float(), wanted) for rows, wanted in pieces]).mean()


def test_a_copy_that_nothing_reads() -> None:
    (finding,) = found(RULE, traced(Float32Outputs(llama()), batch()))
    assert finding.message == "an output is copied to float32, 16 KiB, which nothing in the step reads"
    assert finding.cause.startswith("a cast to float32 at test_ist204.py:")
    assert finding.price is not None
    assert finding.price.memory_bytes == 2 * 16 * 128 * 4
    assert finding.severity in ("note", "warning")


def test_a_copy_that_the_loss_reads_in_pieces() -> None:
    inputs = batch()
    ids = inputs["input_ids"]
    (finding,) = found(RULE, traced(llama(), lambda m: chunked(m(input_ids=ids).logits.float(), ids)))
    assert finding.message == "an output is copied to float32, 16 KiB, which the loss reads in pieces"
    assert finding.fixes[0].description == "split first, then cast each piece to float32"


def test_each_piece_cast_by_itself() -> None:
    ids = batch()["input_ids"]
    assert found(RULE, traced(llama(), lambda m: chunked(m(input_ids=ids).logits, ids))) == []


def test_the_copy_of_the_loss_itself() -> None:
    assert found(RULE, traced(llama(), batch())) == []
    # A cache that is filled in training is a note: autocast's `cat` makes it float32.
    noted = found(RULE, traced(llama(FP32), batch(), autocast=BF16))
    assert {finding.severity for finding in noted} <= {"note"}
