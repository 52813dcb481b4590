from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reality import real_step
from tests.rules.traces import BF16, FP32, found, traced, verified

RULE = "ist109_kernels"


class Spectral(nn.Module):
    """Singular values of a layer's output."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4).to(BF16)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(self.proj(x).to(self.dtype))


X = torch.ones(2, 4, dtype=BF16)


@pytest.mark.real_cpu
def test_svd_in_bfloat16() -> None:
    (finding,) = verified(Spectral(BF16), {"x": X}, "IST109")
    assert finding.message == "aten._linalg_svd.default has no kernel for bfloat16 on this device"
    assert (finding.module, finding.phase) == ("", "forward")
    assert finding.notes == (f"the device raises: {real_step(Spectral(BF16), {'x': X}).error}",)


def test_svd_in_float32() -> None:
    assert found(RULE, traced(Spectral(FP32), {"x": X})) == []
