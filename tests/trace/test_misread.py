"""An operator that takes a dtype and misreads it: nothing is raised, and the step is in error all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import isotype
from isotype.contracts.pattern import CORRUPTS

pytest.importorskip("bitsandbytes")


class Scaled(nn.Module):
    """A layer that dequantizes by hand, with scales of one dtype and a table of float32."""

    def __init__(self, scales: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 4, dtype=torch.bfloat16)
        self.register_buffer("codes", torch.zeros(64, dtype=torch.uint8))
        self.register_buffer("absmax", torch.ones(1, dtype=scales))
        self.register_buffer("table", torch.ones(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes, absmax, table = self.codes, self.absmax, self.table
        scale = torch.ops.bitsandbytes.dequantize_blockwise(codes, absmax, table, 64, torch.bfloat16)
        made: torch.Tensor = self.proj(x * scale)
        return made


@pytest.mark.parametrize("device", ["cpu-avx2", "t4", "a100", "mi300x"])
def test_scales_that_the_kernel_misreads(device: str) -> None:
    inputs = {"x": torch.ones(2, 64, dtype=torch.bfloat16)}
    report = isotype.check(Scaled(torch.bfloat16), inputs, device=device, optimizer="sgd")
    (error,) = report.errors
    assert (error.code, error.op) == ("IST101", "bitsandbytes.dequantize_blockwise.default")
    assert error.message.startswith("bfloat16 instead of float32")
    assert error.cause == "the buffer absmax is bfloat16"
    assert f"the device raises: {CORRUPTS}" in error.notes
    assert any(fix.verified for fix in error.fixes)
    sound = isotype.check(Scaled(torch.float32), inputs, device=device, optimizer="sgd", verify=False)
    assert not sound.errors
