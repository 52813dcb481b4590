"""A weight as a format stores it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isotype.compat.bitsandbytes import dequantize_4bit
from isotype.core.dtypes import parse_dtype
from isotype.core.formats import FORMATS
from isotype.model.fitted import nearest_values
from isotype.model.quantize import quantize_4bit, quantize_int8

_PIECE = 1 << 20
_BLOCKS = 64  # rows in whole blocks of 4 bits, however wide a row is


def rounded(
    weight: torch.Tensor, form: str, moments: torch.Tensor | None = None, *, exact: bool = True
) -> torch.Tensor:
    """The values `[rows, columns]` in float32 that a float32 weight, or whole blocks of its rows, has in a format.

    Args:
        weight: `[rows, columns]`.
        form: one of `isotype.precision.damages.MEASURED`.
        moments: `[columns]`, of the layer's input channels; what constants are fitted to in a format that says so.
        exact: bitsandbytes' values to the bit; else see `isotype.model.fitted.nearest_values`, in half the time.

    Raises:
        ValueError: a format that is fitted, without moments.
    """
    if form == "int8":
        codes, scales = quantize_int8(weight)
        return codes.float() * (scales.float() / 127).to(weight.device).unsqueeze(1)
    if form in ("bfloat16", "float16"):
        return weight.to(parse_dtype(form)).float()
    name, size = FORMATS[form].code, FORMATS[form].block
    fitted = FORMATS[form].fitted
    if fitted and moments is None:
        raise ValueError(f"{form} is fitted to the moments of a layer's inputs, and there are none")
    if fitted or not exact:
        return nearest_values(weight, name, moments if fitted else None, blocksize=size)
    codes, state = quantize_4bit(weight.contiguous(), name, blocksize=size)
    return dequantize_4bit(codes, state).float()


def pieces(rows: int, columns: int) -> Iterator[slice]:
    """Rows of a weight that are in work at a time: some megabytes, in whole blocks of 4 bits."""
    step = max(_BLOCKS, _PIECE // max(1, columns) // _BLOCKS * _BLOCKS)
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
