"""FP8 layers of transformers, traced without their kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.integrations import finegrained_fp8

import isotype
from isotype.compat.transformers import fp8_kernels_replaced

BF16 = torch.bfloat16


class Net(nn.Module):
    """A trained layer before a frozen FP8 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(32, 32, dtype=BF16)
        self.base = finegrained_fp8.FP8Linear(32, 16, (16, 16), has_bias=True).requires_grad_(False)
        self.base.bias.data = self.base.bias.data.to(BF16)
        self.experts = finegrained_fp8.FP8GroupedLinear(16, 32, 2, (16, 16)).requires_grad_(False)
        for weight in (
            *self.base.parameters(),
            *self.experts.parameters(),
        ):  # uninitialized memory may hold NaN
            weight.data = torch.ones(weight.shape).to(weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.base(self.adapter(x))
        return self.experts(torch.stack([hidden, hidden], dim=-2)).float().sum()


@pytest.mark.newest
def test_adapters_on_fp8_layers_train_on_a_gpu_with_fp8_matmuls() -> None:
    report = isotype.check(Net(), {"x": torch.ones(4, 32, dtype=BF16)}, device="h100", optimizer="sgd")
    assert not report.errors
    assert [finding.code for finding in report.findings if finding.code == "IST199"] == []
    multiplied = {call.module for call in report.trace.calls if call.op == "aten.mm.default"}
    assert {"base", "experts"} <= multiplied
    assert "instead of transformers' FP8 kernels, which need the package kernels" in " ".join(
        str(report).split()
    )


@pytest.mark.parametrize("device", ["a100", "cpu"])
def test_other_devices_have_no_such_kernel(device: str) -> None:
    report = isotype.check(Net(), {"x": torch.ones(4, 32, dtype=BF16)}, device=device)
    (finding,) = report.errors
    assert finding.message == f"{report.trace.setup.profile.title} has no kernel for transformers' FP8Linear"
    assert "FineGrainedFP8Config(dequantize=True)" in finding.fixes[0].description


def test_the_kernels_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until FP8 layers run without `kernels`, a trace needs the replacement. A kernel has no backward.

    In transformers 5.20, there is one function, and no layer has a backward.
    """
    layer, x = Net().base, torch.ones(4, 32, dtype=BF16, requires_grad=True)
    for _ in range(2):
        before = vars(finegrained_fp8).copy()
        with fp8_kernels_replaced(True):
            assert finegrained_fp8.fp8_linear is not before["fp8_linear"]
            named = {"block_size": (16, 16), "bias": layer.bias, "activation_scale": None}
            product = finegrained_fp8.fp8_linear(x, layer.weight, layer.weight_scale_inv, **named)
            assert not product.requires_grad
        assert vars(finegrained_fp8) == before
        monkeypatch.delattr(finegrained_fp8, "fp8_grouped_matmul", raising=False)
