from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reality import real_step
from tests.rules.traces import BF16, FP32, found, traced, verified

RULE = "ist106_convolution"


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3)).to(BF16)


def pixels(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"input": torch.ones(1, 3, 6, 6, dtype=dtype)}


@pytest.mark.real_cpu
def test_pixels_in_another_dtype() -> None:
    (finding,) = verified(model(), pixels(FP32), "IST106")
    assert finding.message == "float32 instead of bfloat16 in a convolution"
    assert (finding.module, finding.phase) == ("0", "forward")
    assert finding.cause == "the argument input is float32"
    assert finding.notes == (f"the device raises: {real_step(model(), pixels(FP32)).error}",)
    assert [(fix.description, fix.safety, fix.verified) for fix in finding.fixes] == [
        ("pass input to the model in bfloat16", "safe", True),
        ("cast the inputs of 0 to bfloat16", "safe", True),
        ("run the step under autocast to bfloat16", "safe", True),
    ]


def test_pixels_in_the_models_dtype() -> None:
    assert found(RULE, traced(model(), pixels(BF16))) == []
