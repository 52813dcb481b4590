"""Blocks of MXFP4 against the numbers that the specification gives their codes."""

from __future__ import annotations

import pytest
import torch

from isotype.model.experts import mxfp4

_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("outputs", [3, 17_000])
def test_values_are_code_times_power_of_two(dtype: torch.dtype, transposed: bool, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (2, outputs, 2, 32), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(0, 253, (2, outputs, 2), generator=generator, dtype=torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    exact = torch.tensor(_VALUES, dtype=torch.float64)[codes.long()]
    exact = (exact * 2.0 ** (exponents.double()[..., None] - 127)).view(2, outputs, 64)
    values = mxfp4.unpack(blocks, exponents, dtype, transposed)
    assert values.is_contiguous()
    assert torch.equal(values.mT if transposed else values, exact.to(dtype))


def test_without_memory_it_has_the_shape() -> None:
    blocks, exponents = (
        torch.empty(shape, dtype=torch.uint8, device="meta") for shape in ((2, 3, 2, 16), (2, 3, 2))
    )
    values = mxfp4.unpack(blocks, exponents, torch.bfloat16, True)
    assert (values.shape, values.dtype, values.device.type) == ((2, 64, 3), torch.bfloat16, "meta")
