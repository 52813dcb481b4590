"""Constants fitted to inputs, against a search on a fine grid and bitsandbytes' own dequantization."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from isotype.model.fitted import nearest_values
from isotype.model.quantize import quantize_4bit
from isotype.precision.policy import read_moments, write_moments
from tests.pairwise import pairwise
from tests.without_float64 import WithoutFloat64


def inputs_of(columns: int) -> torch.Tensor:
    """Moments of which some are a thousand times the others."""
    moments = torch.rand(columns, generator=torch.Generator().manual_seed(1)) + 0.1
    moments[::17] *= 1000
    return moments


def error(weight: torch.Tensor, codes: torch.Tensor, state: object, moments: torch.Tensor) -> torch.Tensor:
    """Of each row, what the errors of its weights do to outputs."""
    off = bnb.dequantize_4bit(codes, state).float() - weight.float()
    return (off.square() * moments).sum(1)


@pytest.mark.parametrize("form", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64])
def test_no_block_is_worse_and_most_are_near_the_best_of_a_fine_grid(form: str, blocksize: int) -> None:
    weight = torch.randn(48, blocksize, generator=torch.Generator().manual_seed(0))  # a row is a block
    moments = inputs_of(blocksize)
    fitted = error(weight, *quantize_4bit(weight, form, moments=moments, blocksize=blocksize), moments)
    plain = error(weight, *quantize_4bit(weight, form, blocksize=blocksize), moments)
    assert (fitted <= plain * (1 + 1e-3)).all()  # codes are the nearest up to 1/32767 of a block's range
    assert fitted.sum() < 0.7 * plain.sum()
    levels = bnb.get_4bit_type(form, device="cpu")
    best = torch.full((48,), torch.inf)
    for factor in torch.linspace(0.5, 1.2, 141):
        constants = weight.abs().amax(1, keepdim=True) * factor
        near = (weight / constants).unsqueeze(-1).sub(levels).abs().argmin(-1)
        off = levels[near] * constants - weight
        best = torch.minimum(best, (off.square() * moments).sum(1))
    # Three starts find a local minimum each; the grid's is lower in some blocks.
    assert fitted.sum() < 1.5 * best.sum()


@pairwise(
    "shape, dtype, double_quant",
    [(5, 72), (7, 33), (3, 64), (1, 1)],
    [torch.float32, torch.bfloat16, torch.float16],
    [False, True],
    strength=1,
)
def test_shapes_and_dtypes_are_stored_as_bitsandbytes_does(
    shape: tuple[int, int], dtype: torch.dtype, double_quant: bool
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    moments = inputs_of(shape[1])
    codes, state = quantize_4bit(weight, "nf4", moments=moments, double_quant=double_quant)
    plain_codes, plain = quantize_4bit(weight, "nf4", double_quant=double_quant)
    assert (codes.shape, codes.dtype) == (plain_codes.shape, plain_codes.dtype)
    assert (state.shape, state.dtype, state.blocksize, state.nested) == (
        plain.shape,
        plain.dtype,
        plain.blocksize,
        plain.nested,
    )
    assert state.absmax.shape == plain.absmax.shape
    fitted = error(weight, codes, state, moments).sum()
    # Quantized constants: a relative error of some percent more.
    assert fitted <= error(weight, plain_codes, plain, moments).sum() * 1.1 + 1e-6


@pytest.mark.parametrize("shape", [(50, 72), (7, 33), (3, 64)])
def test_values_without_codes_are_those_of_the_codes(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for moments in (inputs_of(shape[1]), None):
        values = nearest_values(weight, "nf4", moments, blocksize=64)
        expected = bnb.dequantize_4bit(*quantize_4bit(weight, "nf4", moments=moments))
        # In the middle between two values of the format it may be the other one: a few elements of each 10,000.
        assert ((values - expected).abs() > 1e-6).float().mean() < 1e-3
    weight[0, 1] = torch.inf
    assert nearest_values(weight, "nf4", None, blocksize=64).shape == shape


def test_rows_of_a_weight_are_cut_anywhere() -> None:
    weight = torch.randn(12, 40, generator=torch.Generator().manual_seed(0))
    moments = inputs_of(40)
    codes, state = quantize_4bit(weight, "nf4", moments=moments)
    flat = weight.flatten()[192:448]  # whole blocks that begin in the middle of a row
    part, part_state = quantize_4bit(flat, "nf4", moments=moments, first=192 % 40)
    assert torch.equal(part, codes[192 // 2 : 448 // 2])
    assert torch.equal(part_state.absmax, state.absmax[3:7])


def test_zeros_and_values_that_are_not_finite() -> None:
    weight = torch.zeros(2, 64)
    weight[1, 3] = torch.inf
    _, state = quantize_4bit(weight, "nf4", moments=torch.ones(64))
    assert state.absmax.tolist() == [0.0, torch.inf]


def test_moments_as_text() -> None:
    squares = torch.tensor([0.0, 1.0, 2.0, 4096.0])
    text = write_moments(squares, 10**12)
    assert read_moments(text).tolist() == pytest.approx([2**-31.5, 2**-12, 2**-11, 1.0])
    assert len(write_moments(squares, 0)) == 4
    with pytest.raises(ValueError, match="substring"):
        read_moments("A!")


def test_moments_are_written_on_a_device_without_float64() -> None:
    squares = torch.tensor([1.0, 4.0, 9.0])
    assert write_moments(squares.as_subclass(WithoutFloat64), 3) == write_moments(squares, 3)
