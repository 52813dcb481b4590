"""Quantizes to nf4, fp4 and int8 on a CPU, several times faster than bitsandbytes and with bitwise equal results.

On CPUs, bitsandbytes (0.50.2, `backends/default/ops.py`) processes the whole tensor at once, and mostly does a binary
search for each element. This file processes pieces that fit into the caches, and reads codes from a table.

An element divided by its block's absmax is in [-1, 1]. The element gets the code of the nearest 4-bit value, so codes
change at the midpoints of neighboring values. The table has a code for each of 65536 equal cells of [-1, 1]. If a cell
contains a midpoint, a search with bitsandbytes' arithmetic finds the code.
"""

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch

from isotype.compat.bitsandbytes import quantized_on
from isotype.model.fitted import fitted_codes

_PIECE = 1 << 19
"""Number of elements that are processed at once. In float32, they fit into the CPU's caches and occupy all threads."""
_UNDECIDED = 0x80
_ANY_UNDECIDED = -0x7F7F7F7F7F7F7F80  # the same bit in each byte of an int64
_HALF_RANGE = 32767
_CELLS = 1 << 16
_MIDDLE = torch.tensor(32768.0, dtype=torch.float32)
_LEAST = 1e-38  # bitsandbytes' smallest divisor; a block of zeros has a smaller absmax


@dataclass(frozen=True)
class _Format:
    """A 4-bit format: 15 boundaries, the codes of the 16 intervals between them, and the codes of the 65536 cells."""

    bounds: torch.Tensor
    codes: torch.Tensor
    cells: torch.Tensor


def quantize_4bit(
    weight: torch.Tensor,
    form: str,
    *,
    blocksize: int = 64,
    double_quant: bool = False,
    storage: torch.dtype = torch.uint8,
    moments: torch.Tensor | None = None,
    first: int = 0,
) -> tuple[torch.Tensor, Any]:
    """Quantize a weight as `bitsandbytes.functional.quantize_4bit` does, or with constants fitted to the layer's inputs.

    Args:
        weight: float32, bfloat16 or float16, any shape; with `moments`, a layer's weight or a contiguous part of its values.
        double_quant: True to quantize also absmax, to 8 bits in blocks of 256 (https://arxiv.org/abs/2305.14314, section 3).
        moments: E[x²] of each input channel `[in]`, times any common factor, to fit the constants; None for bitsandbytes'
            constants.
        first: for a part of a weight with `moments`, the column of its first element in the layer's weight.

    Returns:
        (codes `[ceil(elements / 2) / storage.itemsize, 1]` in the dtype `storage`, `QuantState`). A byte contains two
        codes. As in bitsandbytes, each code is the nearest code for the float32 constants. Double quantization rounds
        these constants afterwards.
    """
    from bitsandbytes import functional

    flat = weight.detach().reshape(-1)
    if moments is not None:
        packed: tuple[torch.Tensor, torch.Tensor] | None = fitted_codes(flat, form, moments, blocksize, first)
    else:
        # Two codes are packed as an int16, which depends on the machine's byte order.
        on_cpu = weight.device.type == "cpu" and sys.byteorder == "little"
        packed = _codes_4bit(flat, form, blocksize) if on_cpu else None
    if packed is None:
        return functional.quantize_4bit(  # type: ignore[no-any-return]
            weight,
            blocksize=blocksize,
            compress_statistics=double_quant,
            quant_type=form,
            quant_storage=storage,
        )
    codes, absmax = packed
    settings = {"shape": weight.shape, "dtype": weight.dtype, "blocksize": blocksize, "quant_type": form}
    return codes.view(storage).unsqueeze(1), state_4bit(absmax, double_quant=double_quant, **settings)


def state_4bit(absmax: torch.Tensor, *, double_quant: bool, **settings: Any) -> Any:
    """Return bitsandbytes' `QuantState` for `absmax` `[blocks]`. `settings`: `shape`, `dtype`, `blocksize`, `quant_type`."""
    from bitsandbytes import functional

    settings["code"] = functional.get_4bit_type(settings["quant_type"], device=absmax.device)
    if double_quant:
        offset = absmax.mean()
        absmax, nested = functional.quantize_blockwise(absmax - offset, blocksize=256)
        settings |= {"offset": offset, "state2": nested}
    return functional.QuantState(absmax=absmax, **settings)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes `[rows, columns]` and float32 row scales `[rows]`, as in `bitsandbytes.nn.Int8Params`.

    code = round(127 x / absmax of the row) for the weight x in float16 (https://arxiv.org/abs/2208.07339, section 2).
    In a row of zeros, the codes are 0. float16 has few digits for small numbers, and overflows above 65504. Therefore
    rows whose absmax is below 2^-6 or above 65504 are first multiplied by a power of two.
    """
    weight = weight.detach()
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, dtype=torch.float32, device=weight.device)
    step = max(1, _PIECE // max(1, columns))
    for begin in range(0, rows if columns else 0, step):
        part = slice(begin, begin + step)
        absmax = weight[part].abs().amax(dim=1, keepdim=True)
        factors = _into_float16(absmax)
        values = (weight[part] * factors).to(torch.float16).float()
        largest = (absmax * factors).to(torch.float16).float()
        # In rows of zeros, 0 x (127 / 0) is NaN.
        codes[part] = values.mul_(127.0 / largest).round_().nan_to_num_()
        scales[part] = (largest / factors).squeeze(1)
    return codes, scales


def _into_float16(absmax: torch.Tensor) -> torch.Tensor:
    """Return float32 powers of two that move rows with these largest magnitudes into the range of float16; 1 if they fit."""
    absmax = absmax.float()
    factors = torch.exp2(-torch.frexp(absmax).exponent.clamp(min=-126).float())
    return torch.where((absmax >= 2.0**-6) & (absmax <= 65504) | (absmax == 0), 1.0, factors)


def _codes_4bit(flat: torch.Tensor, form: str, blocksize: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return packed codes [ceil(n / 2)] and absmax [blocks] of n values, or None if a value is not finite."""
    total = flat.numel()
    whole = total - total % blocksize
    codes = torch.empty((total + 1) // 2, dtype=torch.uint8)
    absmax = torch.empty(-(-total // blocksize), dtype=torch.float32)
    table = _format(form)
    step = _PIECE - _PIECE % blocksize
    work = torch.empty(3, min(step, whole), dtype=torch.float32)
    for begin in range(0, whole, step):
        end = min(begin + step, whole)
        blocks = slice(begin // blocksize, end // blocksize)
        single = _piece(table, flat[begin:end].view(-1, blocksize), absmax[blocks], work)
        if single is None:
            return None
        # 4097 (low + 256 high) has 16 low + high in its high byte
        codes[begin // 2 : end // 2] = single.view(torch.int16).mul_(4097).bitwise_right_shift_(8)
    if whole < total:
        absmax[-1], rest = _last_block(flat[whole:].float(), table)
        codes[whole // 2 :] = rest
    return (codes, absmax) if bool(absmax.isfinite().all()) else None


def _piece(
    form: _Format, blocks: torch.Tensor, absmax: torch.Tensor, work: torch.Tensor
) -> torch.Tensor | None:
    """Return the codes of `blocks` [blocks, blocksize], one code per byte. Write the largest magnitudes to `absmax`.

    Return None if a value is not finite. `work` is scratch memory: float32 `[3, n]` for at most n elements.
    """
    values, sizes, cells = work[:, : blocks.numel()].view(3, *blocks.shape)
    torch.abs(values.copy_(blocks), out=sizes)
    torch.amax(sizes, dim=1, out=absmax)
    if not absmax.max() < torch.inf:
        return None
    values.mul_(absmax.clamp_min(_LEAST).reciprocal_().unsqueeze(1))
    places = cells.view(torch.int32).copy_(torch.add(_MIDDLE, values, alpha=_HALF_RANGE, out=sizes))
    single = form.cells.index_select(0, places.view(-1))
    undecided = (single.view(torch.int64) & _ANY_UNDECIDED).nonzero()
    if undecided.numel():
        where = (undecided * 8 + torch.arange(8)).view(-1)
        single[where] = _nearest(form, values.view(-1)[where])
    return single


def _nearest(form: _Format, scaled: torch.Tensor) -> torch.Tensor:
    """Search the codes of scaled elements. At a midpoint, the code of the lower value is chosen."""
    return form.codes[torch.bucketize(scaled.clamp(-1, 1), form.bounds)]


def _last_block(flat: torch.Tensor, form: _Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (absmax, packed codes) of a block that is not full. As in bitsandbytes, absmax is never zero."""
    most = flat.abs().max().clamp(min=_LEAST)
    scaled = torch.nn.functional.pad(flat / most, (0, flat.numel() % 2))
    single = _nearest(form, scaled.nan_to_num())
    return most, (single[::2] << 4) | single[1::2]


@functools.cache
def _format(name: str) -> _Format:
    from bitsandbytes.functional import get_4bit_type

    values = get_4bit_type(name, device="cpu")
    order = torch.argsort(values)
    bounds = (values[order[:-1]] + values[order[1:]]) / 2
    codes = order.to(torch.uint8)
    at = bounds.double() * _HALF_RANGE + 32768
    cells = codes[torch.bucketize(torch.arange(_CELLS, dtype=torch.float64), at)]
    for rounding in (-0.05, 0.05):  # rounding of a float32 near 65536, about 0.004
        cells[(at + rounding).long()] |= _UNDECIDED
    return _Format(bounds, codes, cells)


def quantize_blank(layer: Any, dtype: torch.dtype) -> None:
    """Replace a bitsandbytes layer's weight by a quantized weight on the meta device."""
    dense = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device="meta")
    old = layer.weight
    settings = {name: value for name, value in vars(old).items() if name not in ("CB", "SCB")}
    layer.weight = quantized_on(type(old)(dense, requires_grad=False, **settings), "meta")
