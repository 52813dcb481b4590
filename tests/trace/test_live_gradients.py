"""What an optimizer's step changes: measured on samples of the parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from isotype.records.trace import Origin
from isotype.trace.live.gradients import IdleSteps, after_step, samples_of


@pytest.mark.parametrize(("gradient", "rate", "spoiled"), [(math.nan, 0.1, ()), (4.0, 6e4, ("weight",))])
def test_a_step_is_blamed_for_values_that_its_gradient_did_not_spoil(
    gradient: float, rate: float, spoiled: tuple[str, ...]
) -> None:
    """zylo117/Yet-Another-EfficientDet-Pytorch #502: the loss itself is NaN."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    weight.grad = torch.full_like(weight, gradient)
    optimizer = torch.optim.SGD([weight], lr=rate)
    samples = samples_of(optimizer, {id(weight): Origin("parameter", weight.dtype, "weight")})
    optimizer.step()
    assert not weight.isfinite().any()
    assert after_step(optimizer, samples)["spoiled"] == spoiled


@pytest.mark.parametrize("together", [False, True])
def test_heads_of_other_tasks_are_idle_on_purpose(together: bool) -> None:
    """A multi-task training calls `step` of each head's optimizer, and computes gradients for one task at a time."""
    heads = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    first, second = (torch.optim.SGD([head]) for head in heads)
    reported: list[tuple[int, str]] = []
    idle = IdleSteps(lambda *step: reported.append(step))
    try:
        for head, optimizer in zip(heads, (first, second), strict=True):
            head.grad = torch.ones(2)
            optimizer.step()
        heads[0].grad = None
        for _ in range(3):
            first.step()
            if together:
                second.step()
    finally:
        idle.detach()
    assert [number for number, _ in reported] == [1] * (not together)
