"""Rounds weights to 4 bits in bitsandbytes' format, with block constants that are fitted to a layer's inputs.

In bitsandbytes, the constant of a block is its largest magnitude, but dequantization works with any constant. In most
language models, a few input channels are much larger than the others. The errors of their weights are most of the
output's error. If the inputs x of a block are nearly independent, weight errors d cause the output error E[(x · d)²] =
Σ E[x²] d². For weights w with codes c and the values v(c) of the codes, the best constant is s = Σ E[x²] w v(c) / Σ
E[x²] v(c)². With this constant, the codes nearest to w / s have at most the error of c. AWQ searches such constants on
a grid (https://arxiv.org/abs/2306.00978, section 3.2).
"""

import functools
import math
from collections.abc import Iterator

import torch

_STARTS = (1.0, 0.85, 0.7)
"""The constants with which the fit begins, as fractions of the block's largest magnitude."""
_PIECE = 1 << 18
"""Number of elements that are processed at once. In float32, they fit into the caches."""
_LEAST = 1e-38
_HALF_RANGE = 32767
_MIDDLE = torch.tensor(_HALF_RANGE + 0.5, dtype=torch.float32)  # makes the conversion to int round to nearest


def fitted_codes(
    flat: torch.Tensor, form: str, moments: torch.Tensor, blocksize: int, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (packed codes `[ceil(n / 2)]`, float32 constants `[blocks]`) of n values. The constants are fitted to
    inputs.

    Args:
        moments: E[x²] of each input channel, times any common factor; `[in]`.
        first: the column, in the weight of the layer, of the first value.
    """
    count = math.ceil(flat.numel() / blocksize)
    codes = torch.empty(count * blocksize, dtype=torch.uint8, device=flat.device)
    constants = torch.empty(count, dtype=torch.float32, device=flat.device)
    _, codes_of = _cells(form, flat.device)
    for begin, values, weights in _blocks(flat, blocksize, moments, first):
        part = _constants(values, weights, form)
        constants[begin : begin + part.numel()] = part
        chosen = codes_of.index_select(0, _cell(_finite(values, part), part))
        codes[begin * blocksize :][: chosen.numel()] = chosen
    even = codes[: flat.numel() + flat.numel() % 2]
    return (even[::2] << 4) | even[1::2], constants


def nearest_values(
    weight: torch.Tensor, form: str, moments: torch.Tensor | None, *, blocksize: int
) -> torch.Tensor:
    """Return the values of a float32 weight after rounding to 4 bits. Codes are not computed.

    Without `moments`, constants are the blocks' largest magnitudes. Near the midpoint of two 4-bit values (within
    1/32767), bitsandbytes may choose the other value.

    Args:
        weight: a weight `[rows, columns]`, or some of its whole blocks.
    """
    flat = weight.detach().reshape(-1)
    near = torch.empty_like(flat)
    values_of, _ = _cells(form, flat.device)
    for begin, values, weights in _blocks(flat, blocksize, moments, 0):
        part = values.abs().amax(dim=1) if weights is None else _constants(values, weights, form)
        chosen = values_of.index_select(0, _cell(_finite(values, part), part))
        chosen = chosen.view_as(values).mul_(part.unsqueeze(1))
        place = near[begin * blocksize :][: chosen.numel()]
        place.copy_(chosen.view(-1)[: place.numel()])
    return near.view_as(weight)


def _blocks(
    flat: torch.Tensor, blocksize: int, moments: torch.Tensor | None, first: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """Yield (first block's index, values, moments); both tensors: float32 `[blocks, blocksize]`, padded with zeros."""
    columns = 1 if moments is None else moments.numel()
    repeated = None
    if moments is not None:  # repeated, because a piece can begin at any column
        repeated = moments.to(flat.device, torch.float32).repeat(math.ceil(_PIECE / columns) + 1)
    step = _PIECE // blocksize * blocksize
    for begin in range(0, flat.numel(), step):
        values = flat[begin : begin + step].float()
        at = (first + begin) % columns
        weights = None if repeated is None else repeated[at : at + values.numel()]
        padding = -values.numel() % blocksize
        if padding:
            values = torch.nn.functional.pad(values, (0, padding))
            weights = None if weights is None else torch.nn.functional.pad(weights, (0, padding))
        weights = None if weights is None else weights.view(-1, blocksize)
        yield begin // blocksize, values.view(-1, blocksize), weights


def _constants(values: torch.Tensor, weights: torch.Tensor | None, form: str) -> torch.Tensor:
    assert weights is not None
    largest = values.abs().amax(dim=1)
    values = _finite(values, largest)
    products = values * weights
    values_of, _ = _cells(form, values.device)
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
    return constants


def _finite(values: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    """In blocks whose constant is not finite, replace NaN and infinity by 0."""
    return values if constants.max() < torch.inf else values.nan_to_num(0, 0, 0)


def _cell(values: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    """Divide values by their block's constant. Return the index `[elements]` of each value in the tables of `_cells`."""
    scaled = values * constants.clamp_min(_LEAST).reciprocal_().unsqueeze(1)
    return torch.add(_MIDDLE, scaled.clamp_(-1, 1), alpha=_HALF_RANGE).int().view(-1)


@functools.cache
def _cells(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables for 65535 cells of [-1, 1]: the nearest 4-bit value, and its code. A search for the nearest value would be slower."""
    from bitsandbytes.functional import get_4bit_type

    values, codes = get_4bit_type(name, device=device).sort()
    cells = torch.arange(2 * _HALF_RANGE + 1, dtype=torch.float32, device=device) / _HALF_RANGE - 1
    nearest = torch.bucketize(cells, (values[:-1] + values[1:]) / 2)
    return values[nearest], codes.to(torch.uint8)[nearest]
