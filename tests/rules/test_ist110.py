from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reality import real_step
from tests.rules.traces import BF16, found, traced, verified

RULE = "ist110_norms"
X = torch.ones(2, 8, dtype=BF16)


def model(wide_bias: bool) -> nn.Module:
    made = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(BF16)
    if wide_bias:
        made[1].bias.data = torch.full((8,), 1 / 3)
    return made


@pytest.mark.real_cpu
def test_a_bias_in_another_dtype() -> None:
    (finding,) = verified(model(wide_bias=True), {"input": X}, "IST110")
    assert finding.message == "float32 instead of bfloat16 in a norm"
    assert (finding.module, finding.op, finding.phase) == ("1", "aten.native_layer_norm.default", "forward")
    assert finding.cause == "1.bias is float32"
    assert finding.evidence == ("1.bias is float32",)
    assert finding.notes == (f"the device raises: {real_step(model(True), {'input': X}).error}",)
    assert ("cast 1.bias to bfloat16", "unsafe", True) in [
        (fix.description, fix.safety, fix.verified) for fix in finding.fixes
    ]


def test_weight_and_bias_in_the_inputs_dtype() -> None:
    assert found(RULE, traced(model(wide_bias=False), {"input": X})) == []
