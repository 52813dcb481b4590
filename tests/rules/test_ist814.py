from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.rules.traces import BF16, FP32, found, traced
from tests.small import line

RULE = "ist814_nothing_left"
Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Causal attention whose padding `masks` hides; `[2, 4, 8]` and a mask of tokens `[2, 4]`."""

    def __init__(self, masks: Mask) -> None:
        super().__init__()
        self.projection, self.masks = nn.Linear(8, 24), masks

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projection(x).chunk(3, -1)
        seen = mask.bool()[:, None] & torch.ones(4, 4, dtype=torch.bool).tril()
        weights: torch.Tensor = self.masks(q @ k.transpose(1, 2) / 3, seen) @ v
        return weights


INFINITE: dict[str, Mask] = {
    "filled": lambda scores, seen: scores.masked_fill(~seen, -math.inf).softmax(-1),
    "written": lambda scores, seen: scores.clone().masked_fill_(~seen, -math.inf).softmax(-1),
    "chosen": lambda scores, seen: torch.where(seen, scores, -math.inf).softmax(-1),
    "added": lambda scores, seen: (
        scores + torch.zeros(2, 4, 4).masked_fill(~seen, -math.inf).to(scores)
    ).softmax(-1),
    "heads": lambda scores, seen: (
        scores[:, None].masked_fill(~seen[:, None], -math.inf).mul(0.5).squeeze(1).softmax(-1)
    ),
}
FINITE: dict[str, Mask] = {
    "least": lambda scores, seen: scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1),
    "replaced": lambda scores, seen: scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0),
    "cleared": lambda scores, seen: scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0),
    "overwritten": lambda scores, seen: scores.masked_fill(~seen, -math.inf).clone().fill_(0.0).softmax(-1),
    "itself": lambda scores, seen: scores.masked_fill(~(seen | torch.eye(4).bool()), -math.inf).softmax(-1),
}


def batch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(2, 4, 8, dtype=dtype), "mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])}


@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_that_sees_nothing(name: str, dtype: torch.dtype) -> None:
    model = Attention(INFINITE[name]).to(dtype)
    assert model(**batch(dtype)).isnan().any(), "the real step returns what the rule reports"
    (finding,) = found(RULE, traced(model, batch(dtype)))
    assert finding.severity == "error"
    assert finding.message == "no position is visible in 2 rows of a softmax: the result is NaN"
    assert line(finding.source).startswith("test_ist814.py:")


@pytest.mark.parametrize("name", FINITE)
def test_rows_that_see_something_or_are_replaced(name: str) -> None:
    model = Attention(FINITE[name])
    assert model(**batch(FP32)).isfinite().all()
    assert found(RULE, traced(model, batch(FP32))) == []


def test_no_mask_at_all() -> None:
    inputs = {**batch(FP32), "mask": torch.ones(2, 4)}
    assert found(RULE, traced(Attention(INFINITE["filled"]), inputs)) == []


@pytest.mark.parametrize(
    ("value", "reads", "expected"),
    [
        (0, lambda losses, mask: losses[mask].mean(), 1),
        (1, lambda losses, mask: losses[mask].mean(), 0),
        (0, lambda losses, mask: losses[mask].mean().nan_to_num(), 0),
        (0, lambda losses, mask: losses[mask].sum() / mask.sum().clamp(min=1), 0),
        (0, lambda losses, mask: losses.mean() + 0 * losses[losses > 9].mean(), 0),  # an unknown selection
        (0, lambda losses, mask: (losses.mean(), losses[mask].mean())[0], 0),  # a metric
    ],
)
def test_a_mean_over_an_empty_selection(value: int, reads: Mask, expected: int) -> None:
    mask = torch.full((4,), value, dtype=torch.bool)
    model = nn.Linear(8, 1)
    findings = found(RULE, traced(model, lambda model: reads(model(torch.ones(4, 8))[:, 0] ** 2, mask)))
    assert [finding.message for finding in findings] == ["a mean over no values is NaN"] * expected


@pytest.mark.parametrize(("label", "expected"), [(-100, 1), (3, 0)])
def test_a_batch_without_labels(label: int, expected: int) -> None:
    labels = torch.full((8,), -100)
    labels[0] = label
    findings = found(
        RULE, traced(nn.Linear(8, 8), lambda model: F.cross_entropy(model(torch.ones(8, 8)), labels))
    )
    messages = [finding.message for finding in findings]
    assert messages == ["no label of the batch counts in the loss: the mean loss is NaN"] * expected


@pytest.mark.parametrize(("label", "expected"), [(-100, 1), (3, 0)])
def test_a_sum_over_no_label_trains_nothing(label: int, expected: int) -> None:
    """transformers' Trainer divides the sum by a count of labels; trl sums over parts of which some have no label."""
    parts = torch.full((2, 8), -100)
    parts[1, 0] = label

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model(torch.ones(8, 8))
        return sum(F.cross_entropy(logits, part, reduction="sum") for part in parts) / 1  # type: ignore[return-value]

    model = nn.Linear(8, 8)
    loss(model).backward()  # type: ignore[no-untyped-call]
    assert bool(model.weight.grad.any()) == (not expected)  # type: ignore[union-attr]
    findings = found(RULE, traced(nn.Linear(8, 8), loss))
    message = "no label of the batch counts in the loss: the sum is 0 (a mean is NaN), and nothing is trained"
    assert [(finding.severity, finding.message) for finding in findings] == [("warning", message)] * expected
