"""Quantization on a CPU against bitsandbytes' own, bit by bit."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes import functional
from bitsandbytes.nn import Int8Params
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isotype.model import quantize
from isotype.model.quantize import quantize_4bit, quantize_int8
from tests.pairwise import pairwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = ("nf4", "fp4")
BLOCKSIZES = (32, 64, 128, 256, 1024, 4096)
SHAPES = ((1, 1), (1, 64), (3, 21), (7, 64), (64, 48), (5, 1000), (129, 513), (300, 1024), (2, 3, 64))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparing -0.0, NaN and every last digit."""
    return tensor.contiguous().view(torch.uint8)


def same_4bit(weight: torch.Tensor, form: str, blocksize: int = 64, double_quant: bool = False) -> None:
    codes, state = quantize_4bit(weight, form, blocksize=blocksize, double_quant=double_quant)
    expected, expected_state = functional.quantize_4bit(
        weight, blocksize=blocksize, quant_type=form, compress_statistics=double_quant
    )
    assert codes.shape == expected.shape
    assert codes.dtype == expected.dtype
    assert torch.equal(bits(codes), bits(expected))
    given, wanted = state.as_dict(), expected_state.as_dict()
    assert given.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert given[name].dtype == value.dtype
            assert torch.equal(bits(given[name]), bits(value)), name
        else:
            assert given[name] == value, name


def same_int8(weight: torch.Tensor) -> None:
    codes, scales = quantize_int8(weight)
    expected = Int8Params(weight.clone(), requires_grad=False).to("cpu")
    assert codes.dtype == torch.int8
    assert torch.equal(codes, expected.CB)
    assert scales.dtype == torch.float32
    assert torch.equal(bits(scales), bits(expected.SCB))


@pairwise(
    "shape, dtype, form, blocksize, double_quant",
    SHAPES,
    DTYPES,
    FORMS,
    BLOCKSIZES,
    [False, True],
    strength=1,
)
def test_shapes_dtypes_and_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, form: str, blocksize: int, double_quant: bool
) -> None:
    torch.manual_seed(shape[-1])
    same_4bit((torch.randn(shape) * 0.02).to(dtype), form, blocksize, double_quant)


@pytest.mark.parametrize("form", FORMS)
def test_more_elements_than_a_piece(form: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(quantize._PIECE + 5 * 64 + 9)
    weight[1000:2000] = 0
    same_4bit(weight, form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_ties_and_their_neighbours(form: str, dtype: torch.dtype) -> None:
    """Elements on every boundary between two codes, and on the floats beside it."""
    bounds = quantize._format(form).bounds
    near = [bounds, *(torch.nextafter(bounds, torch.full_like(bounds, end)) for end in (-2.0, 2.0))]
    for scale in (1.0, 0.75, 3.0, 2.0**-20):
        same_4bit(
            torch.stack([torch.cat([torch.ones(3), each, -each]) * scale for each in near]).to(dtype), form
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "size", [0.0, -0.0, 1e-45, 1e-40, 1e-38, 2e-38, 1e-36, 1e-20, 1e30, 3.4e38], ids=lambda size: f"{size:g}"
)
def test_zeros_denormals_and_huge_values(form: str, size: float) -> None:
    torch.manual_seed(1)
    weight = torch.rand(5, 100).sub_(0.5).mul_(2) * size
    weight[1] = size
    weight[2] = -size
    same_4bit(weight, form)
    same_4bit(weight[:, :64].contiguous(), form)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [3, 70, 137])
def test_values_that_are_not_finite_leave_their_mark(value: float, where: int) -> None:
    """As bitsandbytes does it: the loader finds them in the constants."""
    weight = torch.ones(138)
    weight[where] = value
    _, state = quantize_4bit(weight, "nf4")
    assert not state.absmax.isfinite().all()


def test_storage_dtypes() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    for storage in (torch.uint8, torch.bfloat16, torch.float32):
        codes, _ = quantize_4bit(weight, "nf4", storage=storage)
        expected, _ = functional.quantize_4bit(weight, quant_type="nf4", quant_storage=storage)
        assert codes.dtype == storage
        assert codes.shape == expected.shape
        assert torch.equal(bits(codes), bits(expected))


def test_rows_narrower_than_a_block_keep_flat_blocks() -> None:
    """Blocks of 64 run on over the ends of rows (see `isotype.compat.bitsandbytes`)."""
    torch.manual_seed(0)
    weight = torch.randn(4, 48)
    codes, state = quantize_4bit(weight, "nf4")
    same_4bit(weight, "nf4")
    single = torch.stack([codes >> 4, codes & 15], dim=1).view(-1).long()
    values = state.code[single] * state.absmax.repeat_interleave(64)
    step = state.code.diff().max() / 2
    assert ((values.view(4, 48) - weight).abs() <= step * weight.abs().max()).all()


@settings(max_examples=60)
@example(
    rows=26,
    columns=27,
    dtype=torch.bfloat16,
    form="nf4",
    blocksize=64,
    exponent=7,
    spread=7,
    zeros=0.98,
    seed=27,
)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    blocksize=st.sampled_from(BLOCKSIZES),
    exponent=st.integers(-45, 38),
    spread=st.integers(0, 12),
    zeros=st.sampled_from([0.0, 0.5, 0.98]),
    seed=st.integers(0, 2**31),
)
def test_any_weight(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    form: str,
    blocksize: int,
    exponent: int,
    spread: int,
    zeros: float,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=random, dtype=torch.float64)
    weight *= 10.0 ** (exponent - spread * torch.rand(rows, columns, generator=random, dtype=torch.float64))
    weight[torch.rand(rows, columns, generator=random) < zeros] = 0
    largest = torch.finfo(dtype).max
    weight = weight.clamp(-largest, largest).to(dtype)
    same_4bit(weight, form, blocksize)
    rows_largest = weight.abs().amax(dim=1).float()  # in bfloat16, 65504 is 65536
    # bitsandbytes loses digits of the other rows.
    same_int8(weight[(rows_largest >= 2.0**-6) & (rows_largest <= 65504)])


@pairwise("dtype, shape", DTYPES, [(1, 1), (3, 7), (64, 64), (5, 70000), (700, 129)], strength=1)
def test_int8(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) * 3).to(dtype)
    weight[0, 0] = 127.5
    same_int8(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_rows_of_small_and_of_large_numbers_lose_no_digits(dtype: torch.dtype) -> None:
    """The codes do not depend on a row's scale, although float16 has few digits near 1e-6, and none above 65504."""
    torch.manual_seed(0)
    weight = torch.randn(5, 300).to(dtype)
    powers = torch.tensor([2.0**-20, 2.0**-60, 1, 2.0**18, 2.0**60])
    codes, scales = quantize_int8(weight)
    same_codes, other_scales = quantize_int8(weight * powers.to(dtype)[:, None])
    assert torch.equal(same_codes, codes)
    assert torch.equal(other_scales, scales * powers)


def test_int8_rows_of_zeros_have_codes_zero() -> None:
    weight = torch.zeros(3, 65)
    weight[1, 3] = 2
    codes, scales = quantize_int8(weight)
    assert codes.count_nonzero() == 1
    assert scales.tolist() == [0, 2, 0]
