"""4-bit codes whose constants are fitted to a layer's inputs, stored as bitsandbytes stores them.

bitsandbytes takes a block's largest magnitude as its constant. Any other dequantizes as well. Where a few input channels are much larger
than the others, as in most language models, their weights decide the error of the output: E[(x, d)²] = Σ E[x²] d² for the errors d of a
block, where channels are as good as independent. For codes c of given values v(c) the constant of least error is
s = Σ E[x²] w v(c) / Σ E[x²] v(c)²; the codes nearest to w / s are as good or better. AWQ searches such constants on a grid
(https://arxiv.org/abs/2306.00978, section 3.2).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from isotype.model.quantize import quantize_4bit, state_4bit

_STARTS = (1.0, 0.85, 0.7)
"""Parts of a block's largest magnitude whose nearest codes are tried."""
_PIECE = 1 << 18
"""Elements that are in work at a time: float32, they stay in the caches."""
_LEAST = 1e-38
_HALF_RANGE = 32767
_MIDDLE = torch.tensor(_HALF_RANGE + 0.5)  # what it is added to is rounded by its conversion to int


def quantize_by(
    moments: torch.Tensor | None, weight: torch.Tensor, form: str, *, first: int = 0, **settings: Any
) -> tuple[torch.Tensor, Any]:
    """`quantize_fitted`, or `quantize_4bit` of a layer whose constants are not fitted: without moments."""
    if moments is None:
        return quantize_4bit(weight, form, **settings)
    return quantize_fitted(weight, form, moments, first=first, **settings)


def quantize_fitted(
    weight: torch.Tensor,
    form: str,
    moments: torch.Tensor,
    *,
    blocksize: int = 64,
    double_quant: bool = False,
    storage: torch.dtype = torch.uint8,
    first: int = 0,
) -> tuple[torch.Tensor, Any]:
    """As `isotype.model.quantize.quantize_4bit`, with constants of least error for inputs of these moments.

    Args:
        weight: float32, bfloat16 or float16, any shape: rows of a layer's weight, or a part of them.
        form: `"nf4"` or `"fp4"`.
        moments: `[in]`, of the layer's input channels, relative to each other.
        blocksize, double_quant, storage: as of `quantize_4bit`.
        first: column of the weight's first element.

    Returns:
        As `quantize_4bit`; the codes are the nearest under constants before these are quantized themselves, as bitsandbytes' are.
    """
    flat = weight.detach().reshape(-1)
    blocks = math.ceil(flat.numel() / blocksize)
    codes = torch.empty(blocks * blocksize, dtype=torch.uint8, device=flat.device)
    constants = torch.empty(blocks, device=flat.device)
    repeated = _repeated(moments.to(flat.device, torch.float32), _PIECE)
    step = _PIECE // blocksize
    for begin in range(0, blocks, step):
        end = min(begin + step, blocks)
        part = flat[begin * blocksize : end * blocksize].float()
        at = (first + begin * blocksize) % moments.numel()
        weights = repeated[at : at + part.numel()]
        padding = (end - begin) * blocksize - part.numel()
        if padding:
            part, weights = (torch.nn.functional.pad(each, (0, padding)) for each in (part, weights))
        constants[begin:end], nearest = _fit(part.view(-1, blocksize), weights.view(-1, blocksize), form)
        codes[begin * blocksize : end * blocksize] = nearest
    even = codes[: flat.numel() + flat.numel() % 2]
    packed = ((even[::2] << 4) | even[1::2]).view(storage).unsqueeze(1)
    settings = {"shape": weight.shape, "dtype": weight.dtype, "blocksize": blocksize, "quant_type": form}
    return packed, state_4bit(constants, double_quant=double_quant, **settings)


def _repeated(moments: torch.Tensor, length: int) -> torch.Tensor:
    """The moments one row after the other, from which `length` can be taken beginning at any column."""
    return moments.repeat(math.ceil(length / moments.numel()) + 1)


def _fit(values: torch.Tensor, weights: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The constants `[blocks]` of blocks `[blocks, blocksize]`, and their codes, one a byte."""
    largest = values.abs().amax(dim=1)
    if not largest.max() < torch.inf:
        values = values.nan_to_num(0, 0, 0)
    products = values * weights
    values_of, codes_of = _cells(form, values.device)
    best, constants = torch.full_like(largest, -1), largest.clone()
    for start in _STARTS:
        near = values_of.index_select(0, _cell(values, largest * start)).view_as(values)
        above = (products * near).sum(1)
        below = near.square_().mul_(weights).sum(1)
        # Σ m (w - s v)² = Σ m w² - (Σ m w v)² / Σ m v² at the best s.
        gain = torch.where((above > 0) & (below > 0), above.square() / below, -1)
        better = gain > best
        best = torch.where(better, gain, best)
        constants = torch.where(better, above / below, constants)
    return constants, codes_of.index_select(0, _cell(values, constants))


def _cell(values: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    """Indices `[elements]` into `_cells` of the blocks' values over their constants."""
    scaled = values * constants.clamp_min(_LEAST).reciprocal_().unsqueeze(1)
    return torch.add(_MIDDLE, scaled.clamp_(-1, 1), alpha=_HALF_RANGE).int().view(-1)


@functools.cache
def _cells(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For cells of [-1, 1], the nearest value `[65535]` of a format and its code: a search for each element takes several times as long."""
    from bitsandbytes.functional import get_4bit_type

    values, codes = get_4bit_type(name, device=device).sort()
    cells = torch.arange(2 * _HALF_RANGE + 1, device=device) / _HALF_RANGE - 1
    nearest = torch.bucketize(cells, (values[:-1] + values[1:]) / 2)
    return values[nearest], codes.to(torch.uint8)[nearest]
