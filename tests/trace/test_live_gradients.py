"""What an optimizer's step changes: measured on samples of the parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from isotype.records.trace import Origin
from isotype.trace.live.gradients import after_step, samples_of


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
