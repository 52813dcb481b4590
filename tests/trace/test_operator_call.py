"""FLOPs of attention, by hand; memory that kernels allocate and free inside of one operator."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import bitsandbytes.functional as functional
import pytest
import torch
from packaging.version import Version
from torch.nn.attention import varlen
from torch.utils.flop_counter import FlopCounterMode

from isotype.trace.operator_call import flops_of, scratch_bytes
from tests.allocations import peak_of
from tests.small import FP32

ATEN = torch.ops.aten
QUERY, KEY = (2, 8, 5, 16), (2, 4, 7, 16)
ONE = 2 * 2 * 8 * 5 * 7 * 16  # a multiply-add counts two: batch, heads, rows, columns, width


def _operands() -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(shape, device="meta") for shape in (QUERY, KEY, KEY))


@pytest.mark.parametrize(
    "name",
    [
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ],
)
def test_keys_that_are_shared_by_heads_count_once_for_each(name: str) -> None:
    """Two products forward; five backward, one of which recomputes the scores."""
    query, key, value = _operands()
    forward, backward = getattr(ATEN, name).default, getattr(ATEN, f"{name}_backward").default
    assert flops_of(forward, (query, key, value), {}, None) == 2 * ONE
    assert flops_of(backward, (query, query, key, value), {}, None) == 5 * ONE


@pytest.mark.parametrize("known", [True, False])
def test_sequences_of_several_lengths(known: bool) -> None:
    """Of 3, 1 and 4 tokens: by what each of them has, or as if all were as long as the longest where nobody may look."""
    assert varlen._varlen_attn  # registers the operators
    operators = torch.ops.torch_attn
    query, key = torch.empty(8, 6, 16, device="meta"), torch.empty(8, 2, 16, device="meta")
    ends = torch.tensor([0, 3, 4, 8], dtype=torch.int32, device="cpu" if known else "meta")
    scores = 2 * 6 * 16 * (3 * 3 + 1 + 4 * 4 if known else 8 * 4)
    forward = (query, key, key, ends, ends, 4, 4)
    backward = (query, query, key, key, query, query, ends, ends, 4, 4)
    assert flops_of(operators._varlen_attn.default, forward, {}, None) == 2 * scores
    assert flops_of(operators._varlen_attn_backward.default, backward, {}, None) == 5 * scores


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"])
def test_products_count_as_torch_counts_them(name: str) -> None:
    batch = (3,) if "bmm" in name else ()
    left, right, result = (torch.empty(*batch, *shape) for shape in ((4, 5), (5, 6), (4, 6)))
    args = (result, left, right) if "add" in name else (left, right)
    with FlopCounterMode(display=False) as counter:
        getattr(ATEN, name.rstrip("_")).default(*args)
    assert flops_of(getattr(ATEN, name).default, args, {}, result) == counter.get_total_flops() > 0


def test_rows_of_grouped_products_count_once() -> None:
    """4 groups of 24 rows in all: the rows by each group's matrix, and the gradients of these matrices."""
    rows, outputs = torch.empty(24, 16), torch.empty(24, 8)
    grouped = ATEN._grouped_mm.default
    assert flops_of(grouped, (rows, torch.empty(4, 16, 8)), {}, outputs) == 2 * 24 * 16 * 8
    assert flops_of(grouped, (rows.t(), outputs), {}, torch.empty(4, 16, 8)) == 2 * 24 * 16 * 8


def test_other_operators_are_counted_by_torch() -> None:
    a, b = torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta")
    assert flops_of(ATEN.mm.default, (a, b), {}, a @ b) == 2 * 3 * 4 * 5
    assert flops_of(ATEN.add.Tensor, (a, a), {}, a + a) == 0


def test_the_oldest_torch_still_needs_our_own_names() -> None:
    """torch 2.12 counts shared keys itself: with it as the lower bound `_with_all_heads` can go."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    torch_bound = next(each for each in project["project"]["dependencies"] if each.startswith("torch>="))
    assert Version(re.sub(r"^torch>=([\d.]+).*", r"\1", torch_bound)) < Version("2.12")


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


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_a_result_in_another_dtype_changes_no_flops(name: str) -> None:
    shape = (2,) if "bmm" in name else ()
    left, right, out = (torch.empty(*shape, *size, device="meta") for size in ((3, 5), (5, 7), (3, 7)))
    operands = (out, left, right) if "add" in name else (left, right)
    for overload, dtypes in (("default", ()), ("dtype", (FP32,)), ("dtype_out", (FP32,))):
        operator = getattr(getattr(ATEN, name), overload)
        assert flops_of(operator, (*operands, *dtypes), {}, out) == 2 * out.numel() * 5
