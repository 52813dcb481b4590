"""Memory that kernels allocate and free inside of one operator, beside what torch's allocator gives out."""

from __future__ import annotations

import bitsandbytes.functional as functional
import pytest
import torch

from isotype.trace.scratch import scratch_bytes
from tests.allocations import peak_of

OPS = torch.ops.bitsandbytes
ROWS, INPUTS, OUTPUTS = 2048, 64, 96


def nearly(measured: int) -> object:
    return pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_layers_on_a_cpu(dtype: torch.dtype) -> None:
    rows = torch.randn(ROWS, INPUTS, dtype=dtype)
    codes, scales, _ = functional.int8_vectorwise_quant(torch.randn(OUTPUTS, INPUTS).half())
    half = rows.half()
    quantize = OPS.int8_vectorwise_quant.default
    peak, (quantized, row_scales, outliers) = peak_of(lambda: quantize(half, 6.0))
    added = scratch_bytes(str(quantize), "cpu", (half, 6.0), quantized)
    assert quantized.nbytes + added == nearly(peak)
    product = OPS.int8_mixed_scaled_mm.default
    arguments = (rows, quantized, codes, row_scales, scales, outliers, None)
    peak, (result, _) = peak_of(lambda: product(*arguments))
    assert result.nbytes + scratch_bytes(str(product), "cpu", arguments, result) == nearly(peak)
    assert 0 < scratch_bytes(str(product), "cuda", arguments, result) < peak / 2


def test_a_4bit_weight_is_dequantized() -> None:
    packed, state = functional.quantize_4bit(torch.randn(OUTPUTS, INPUTS), quant_type="nf4")
    rows = torch.randn(ROWS, INPUTS)
    arguments = (rows, packed.view(-1, 1), state.shape, state.absmax, state.blocksize, "nf4")
    peak, result = peak_of(lambda: OPS.gemm_4bit.default(*arguments))
    added = scratch_bytes("bitsandbytes.gemm_4bit.default", "cpu", arguments, result)
    assert added == OUTPUTS * INPUTS * 4
    assert result.nbytes + added == nearly(peak)


def test_other_operators_have_none() -> None:
    assert scratch_bytes("aten.mm.default", "cpu", (), torch.empty(3)) == 0
