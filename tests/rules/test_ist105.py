from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reality import real_step
from tests.rules.traces import BF16, found, traced
from tests.small import CustomLinear, line

RULE = "ist105_backward"
X = torch.ones(2, 8, dtype=BF16)


def model(last: type[nn.Linear]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), last(8, 8)).to(BF16)


@pytest.mark.real_cpu
def test_a_custom_backward_that_multiplies_two_dtypes() -> None:
    (finding,) = found(RULE, traced(model(CustomLinear), {"input": X}))
    outcome = real_step(model(CustomLinear), {"input": X})
    assert outcome.phase == finding.phase == "backward"
    assert f"the device raises: {outcome.error}" in finding.notes
    assert finding.message == "float32 instead of bfloat16 in the backward"
    assert (finding.module, finding.op) == ("1", "aten.mm.default")
    assert line(finding.source).startswith("small.py:")


def test_autograd_own_backward() -> None:
    assert found(RULE, traced(model(nn.Linear), {"input": X})) == []


def test_the_backward_of_a_loss_calls_no_function() -> None:
    """`huber_loss` and its like accept two dtypes, and their backward refuses them."""
    target = torch.ones(2, 8)
    step = traced(nn.Linear(8, 8).to(BF16), lambda model: nn.functional.huber_loss(model(X), target))
    (finding,) = found(RULE, step)
    assert finding.op.startswith("aten.huber_loss_backward")
    assert "Function" not in "".join(fix.description for fix in finding.fixes)
    assert finding.fixes[0].description.startswith("compute the loss in float32")
