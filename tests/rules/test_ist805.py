from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from isotype.rules.ist805_reductions import find
from tests.rules.samples import BF16, FP32, call, operand, trace
from tests.rules.traces import traced


def test_log_probabilities_in_bfloat16() -> None:
    reduction = call("aten._log_softmax.default", operand(BF16, shape=(2, 16, 512)), numbers=(("dim", -1),))
    (finding,) = find(trace(calls=[reduction, reduction]))
    assert finding.severity == "warning"
    assert finding.message == "log_softmax over 512 values returns bfloat16"
    assert finding.fixes[0].description == "cast the input of log_softmax to float32"


def test_float32_and_short_axes_are_silent() -> None:
    axis = (("dim", 1),)
    wide = call("aten._log_softmax.default", operand(FP32, shape=(2, 512)), result=FP32, numbers=axis)
    experts = call("aten._log_softmax.default", operand(BF16, shape=(32, 8)), numbers=axis)
    assert not list(find(trace(calls=[wide, experts])))


@pytest.mark.parametrize(("dtype", "count", "expected"), [(BF16, 40, 1), (BF16, 8, 0), (FP32, 40, 0)])
def test_a_loop_that_adds_16_bit_losses(dtype: torch.dtype, count: int, expected: int) -> None:
    model = nn.Linear(4, 4, dtype=BF16)

    def loss(model: nn.Module) -> torch.Tensor:
        total = torch.zeros((), dtype=dtype)
        for _ in range(count):
            total = total + model(torch.ones(2, 4, dtype=BF16)).square().mean()
        return total

    message = f"a sum of {count} numbers is rounded to bfloat16 after each addition"
    assert [finding.message for finding in find(traced(model, loss))] == [message] * expected


class Scored(nn.Module):
    """Scores of 8 classes or experts for each of 512 tokens."""

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scores, self.reduce = nn.Linear(4, 8, dtype=BF16), reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(self.scores(x)).float().mean()


@pytest.mark.parametrize(
    ("reduce", "length"),
    [
        (lambda scores: scores.log_softmax(-1), 0),
        (lambda scores: scores.logsumexp(-1), 0),  # a router's z-loss
        (lambda scores: scores.cumsum(0), 512),
        (lambda scores: scores.logsumexp((0, 1)), 4096),
    ],
)
def test_the_length_is_that_of_the_reduced_axis(
    reduce: Callable[[torch.Tensor], torch.Tensor], length: int
) -> None:
    findings = list(find(traced(Scored(reduce), {"x": torch.ones(512, 4, dtype=BF16)})))
    assert [finding.message.split(" over ")[1] for finding in findings] == (
        [f"{length} values returns bfloat16"] if length else []
    )
