from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from isotype.preflight.check import check
from isotype.records.trace import Trace
from isotype.rules.ist813_gradient_sums import find
from isotype.rules.kit.weight_sets import spacing
from tests.rules.samples import BF16, FP16, FP32, adapter, trace
from tests.rules.traces import batch, llama


def accumulated(dtype: torch.dtype, micro_batches: int) -> Trace:
    step = trace([adapter(dtype)], learning_rate=1e-3)
    return replace(step, setup=replace(step.setup, accumulates=micro_batches))


def test_sixty_four_micro_batches_in_bfloat16() -> None:
    (finding,) = find(accumulated(BF16, 64))
    assert (finding.severity, finding.phase) == ("warning", "backward")
    assert finding.message == "gradients of 64 micro-batches are added up in bfloat16"
    assert finding.notes[0] == "affects 1 of 1 trainable parameters; the sums are wrong by about 0.9 %"


@pytest.mark.parametrize(
    ("dtype", "micro_batches", "found"),
    [(BF16, 19, 0), (BF16, 20, 1), (FP16, 64, 0), (FP16, 1259, 1), (FP32, 10**6, 0)],
)
def test_small_errors_and_float32_are_silent(dtype: torch.dtype, micro_batches: int, found: int) -> None:
    assert len(list(find(accumulated(dtype, micro_batches)))) == found


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("micro_batches", [16, 64, 256])
def test_the_error_is_that_of_real_sums(dtype: torch.dtype, micro_batches: int) -> None:
    """Gradients with as much noise as mean; the formula is off by less than a third."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.rand(4096, generator=generator, dtype=torch.float64) + 0.5
    total, exact = torch.zeros(4096, dtype=dtype), torch.zeros(4096, dtype=torch.float64)
    for _ in range(micro_batches):
        gradient = (mean * (1 + torch.randn(4096, generator=generator, dtype=torch.float64))).to(dtype)
        total += gradient
        exact += gradient.double()
    error = float((total.double() - exact).norm() / exact.norm())
    assert error == pytest.approx(math.sqrt(micro_batches / 3) * spacing(1.0, dtype) / 4, rel=0.33)


def test_a_check_that_accumulates_and_its_fix() -> None:
    model = llama(BF16, lora=False)
    report = check(model, batch(), device="a100", accumulates=64, learning_rate=1e-2, wiring=False)
    (finding,) = [each for each in report.findings if each.code == "IST813"]
    assert finding.fixes[0].verified
    assert not [
        each
        for each in check(
            model, batch(), device="a100", accumulates=True, wiring=False, verify=False
        ).findings
        if each.code == "IST813"
    ]


class SummedByChunks(torch.autograd.Function):
    """A product with the transposed weight, whose gradient of the weight is summed over chunks in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, chunks: int, dtype: torch.dtype) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.chunks, ctx.dtype = chunks, dtype
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        total = torch.zeros_like(weight, dtype=ctx.dtype)
        for part, of_part in zip(x.chunk(ctx.chunks), gradient.chunk(ctx.chunks), strict=True):
            total += of_part.t() @ part
        return gradient @ weight, total.to(weight.dtype), None, None


@pytest.mark.parametrize(
    ("dtype", "chunks", "into", "found"),
    [(BF16, 32, BF16, 1), (BF16, 16, BF16, 0), (BF16, 32, FP32, 0), (FP16, 32, FP16, 0)],
)
def test_a_gradient_that_code_sums_over_chunks(
    dtype: torch.dtype, chunks: int, into: torch.dtype, found: int
) -> None:
    """axolotl-ai-cloud/axolotl #1601, with the sum in the backward."""

    class Head(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return SummedByChunks.apply(x, self.weight, chunks, into).float().pow(2).mean()

    x = {"x": torch.ones(64, 4, dtype=dtype)}
    report = check(
        Head(4, 8, bias=False, dtype=dtype), x, device="a100", learning_rate=1.0, wiring=False, verify=False
    )
    sums = [finding for finding in report.findings if finding.code == "IST813"]
    assert len(sums) == found
    for finding in sums:
        assert finding.message == "32 values are added up in a bfloat16 tensor with the shape of weight"
        assert finding.cause.startswith("add into a bfloat16 tensor at test_ist813.py:")
        assert finding.notes == ("the sum is off by about 0.6 %",)
