"""nf4, fp4 and int8 codes on a CPU: bit by bit those of bitsandbytes, in a tenth of the time.

bitsandbytes (0.50.2, `backends/default/ops.py`) quantizes on CPUs with whole-tensor operators; most of the time goes into
a binary search for each element. Here pieces that stay in the caches go through a table, and threads share them.

An element is scaled by its block's 1 / absmax into [-1, 1]; its code is the number of boundaries (midpoints between
neighbouring values of the format) below it. The table has the code for each of 65536 cells of that range. Where a cell
holds a boundary, the element itself is searched, with the very arithmetic of bitsandbytes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

_PIECE = 7 << 12
"""Elements that are in work at a time: fewer than torch's own threads share (32768), so that threads here do not nest."""
_SEARCHED = 8 * _PIECE
"""Elements after which those without a code are searched together."""
_UNDECIDED = 0x80
_ANY_UNDECIDED = -0x7F7F7F7F7F7F7F80  # the same bit in each of the 8 bytes of an int64
_HALF_RANGE = 32767
_CELLS = 1 << 16
_MIDDLE = torch.tensor(32768.0)
_LEAST = 1e-38  # bitsandbytes divides by no less; a block of zeros has an absmax below it


@dataclass(frozen=True)
class _Format:
    """A 4-bit format: `bounds` [15], `codes` [16] that the intervals between them have, `cells` [65536] of codes."""

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
) -> tuple[torch.Tensor, Any]:
    """What `bitsandbytes.functional.quantize_4bit` returns for a weight: its codes and its quantization state.

    Args:
        weight: float32, bfloat16 or float16, any shape.
        form: `"nf4"` or `"fp4"`.
        blocksize: elements that share one absmax.
        double_quant: whether the absmax constants are quantized, too, in blocks of 256 to 8 bits
            (https://arxiv.org/abs/2305.14314, section 3).
        storage: dtype that the codes are stored as.

    Returns:
        `[ceil(elements / 2) / storage.itemsize, 1]` codes in `storage`, two a byte, and the `QuantState`.
    """
    from bitsandbytes import functional

    found = _codes_4bit(weight.detach(), form, blocksize) if _on_cpu(weight) else None
    if found is None:
        return functional.quantize_4bit(  # type: ignore[no-any-return]
            weight,
            blocksize=blocksize,
            compress_statistics=double_quant,
            quant_type=form,
            quant_storage=storage,
        )
    codes, absmax = found
    packed = codes.unsqueeze(1) if storage == torch.uint8 else codes.view(storage).unsqueeze(1)
    settings = {"shape": weight.shape, "dtype": weight.dtype, "blocksize": blocksize, "quant_type": form}
    return packed, state_4bit(absmax, double_quant=double_quant, **settings)


def state_4bit(absmax: torch.Tensor, *, double_quant: bool, **settings: Any) -> Any:
    """bitsandbytes' `QuantState` of a weight whose blocks have these float32 `absmax`, as `quantize_4bit` makes it (0.50.2).

    Args:
        absmax: `[blocks]`.
        double_quant: as of `quantize_4bit`.
        **settings: `shape` and `dtype` of the weight, `blocksize` and `quant_type`.
    """
    from bitsandbytes import functional

    settings["code"] = functional.get_4bit_type(settings["quant_type"], device=absmax.device)
    if double_quant:
        offset = absmax.mean()
        absmax, nested = functional.quantize_blockwise(absmax - offset, blocksize=256)
        settings |= {"offset": offset, "state2": nested}
    return functional.QuantState(absmax=absmax, **settings)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes `[rows, columns]` and float32 row scales `[rows]` of a weight, as `bitsandbytes.nn.Int8Params` has them.

    code = round(127 x / absmax of the row), x in float16 (https://arxiv.org/abs/2208.07339, section 2). A row of zeros
    has codes 0.
    """
    if not _on_cpu(weight):
        from bitsandbytes import functional

        codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        return codes, scales
    weight = weight.detach()
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows)
    step = max(1, _PIECE // max(1, columns))

    def span(first: int, last: int) -> None:
        for begin in range(first, last, step):
            end = min(begin + step, last)
            half = weight[begin:end].to(torch.float16)
            scales[begin:end] = half.abs().amax(dim=1)
            values = half.float().mul_(127.0 / scales[begin:end].unsqueeze(1)).round_()
            codes[begin:end] = values.nan_to_num_()  # 0 x (127 / 0), of rows without a value

    if codes.numel():
        _in_threads(span, rows, step)
    return codes, scales


def _on_cpu(weight: torch.Tensor) -> bool:
    # Two codes are packed by way of an int16, whose bytes lie in the machine's order.
    return weight.device.type == "cpu" and sys.byteorder == "little"


def _codes_4bit(weight: torch.Tensor, form: str, blocksize: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Packed codes [ceil(n / 2)] and absmax [blocks]; None where a value is not finite."""
    flat = weight.reshape(-1)
    total = flat.numel()
    whole = total - total % blocksize
    codes = torch.empty((total + 1) // 2, dtype=torch.uint8)
    absmax = torch.empty(-(-total // blocksize))
    if whole:
        run = functools.partial(_span, _format(form), blocksize, flat, codes, absmax)
        _in_threads(run, whole, _SEARCHED)
    if whole < total:
        absmax[-1], rest = _last_block(flat[whole:].float(), _format(form))
        codes[whole // 2 :] = rest
    return (codes, absmax) if bool(absmax.isfinite().all()) else None


def _span(
    form: _Format,
    blocksize: int,
    flat: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    first: int,
    last: int,
) -> None:
    """Quantize `flat[first:last]`, whole blocks that begin at a multiple of `_SEARCHED`; stops where a value is not finite."""
    single = torch.empty(_SEARCHED, dtype=torch.uint8)
    scratch = _Scratch.of(_PIECE, blocksize)
    for begin in range(first, last, _SEARCHED):
        end = min(begin + _SEARCHED, last)
        part, blocks = flat[begin:end], absmax[begin // blocksize : end // blocksize]
        done = single[: end - begin]
        for piece, most, cells in zip(
            torch.split(part, _PIECE),
            torch.split(blocks, _PIECE // blocksize),
            torch.split(done, _PIECE),
            strict=True,
        ):
            if piece.numel() != _PIECE:
                scratch = _Scratch.of(piece.numel(), blocksize)
            torch.abs(scratch.values.copy_(piece), out=scratch.sizes)
            torch.amax(scratch.size_blocks, dim=1, out=most)
            if not most.max() < torch.inf:
                return
            torch.clamp_min(most, _LEAST, out=scratch.scales).reciprocal_()
            scratch.blocks.mul_(scratch.scale_column)
            scratch.cells.copy_(torch.add(_MIDDLE, scratch.values, alpha=_HALF_RANGE, out=scratch.values))
            torch.index_select(form.cells, 0, scratch.cells, out=cells)
        _search(form, blocksize, part, blocks, single)
        for packed, pairs in zip(
            torch.split(codes[begin // 2 : end // 2], _PIECE // 2), torch.split(done, _PIECE), strict=True
        ):
            # low + 256 high -> 16 low + high, in the high byte
            packed.copy_(pairs.view(torch.int16).mul_(4097).bitwise_right_shift_(8))


@dataclass(frozen=True)
class _Scratch:
    """What the work on one piece is written into, and the same memory in other shapes."""

    values: torch.Tensor
    blocks: torch.Tensor
    sizes: torch.Tensor
    size_blocks: torch.Tensor
    scales: torch.Tensor
    scale_column: torch.Tensor
    cells: torch.Tensor

    @classmethod
    def of(cls, size: int, blocksize: int) -> _Scratch:
        values, sizes, scales = torch.empty(size), torch.empty(size), torch.empty(size // blocksize)
        shape = (-1, blocksize)
        cells = torch.empty(size, dtype=torch.int32)
        return cls(values, values.view(shape), sizes, sizes.view(shape), scales, scales.view(-1, 1), cells)


def _search(
    form: _Format, blocksize: int, flat: torch.Tensor, absmax: torch.Tensor, single: torch.Tensor
) -> None:
    """Give the elements of `flat` that their cell left undecided their codes in `single`."""
    groups = (single.view(torch.int64) & _ANY_UNDECIDED).nonzero()
    if not groups.numel():
        return
    where = (groups * 8 + torch.arange(8)).view(-1)
    # Behind the end of `flat` lies what an earlier piece left.
    where = where[where < flat.numel()]
    inverse = absmax[where // blocksize].clamp_(min=_LEAST).reciprocal_()
    single[where] = _nearest(form, flat[where].float() * inverse)


def _nearest(form: _Format, scaled: torch.Tensor) -> torch.Tensor:
    """The codes of scaled elements; of two values that are equally near, the lower one's."""
    scaled = scaled.clamp(-1, 1)
    if (
        scaled.numel() * len(form.bounds) < _PIECE
    ):  # bucketize has threads of its own for a few hundred elements
        return form.codes[(scaled.unsqueeze(1) > form.bounds).sum(1)]
    return form.codes[torch.bucketize(scaled, form.bounds)]


def _last_block(flat: torch.Tensor, form: _Format) -> tuple[torch.Tensor, torch.Tensor]:
    """absmax and packed codes of a block that is not full: bitsandbytes divides there, and its absmax is never zero."""
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
    for rounding in (-0.05, 0.05):  # of a float32 near 65536, some 0.004
        cells[(at + rounding).long()] |= _UNDECIDED
    return _Format(bounds, codes, cells)


def _in_threads(run: Callable[[int, int], None], total: int, step: int) -> None:
    """`run(first, last)` over `range(total)`, in as many threads as torch uses, parts of whole `step`s."""
    steps = -(-total // step)
    threads = min(torch.get_num_threads(), steps // 2)
    if threads < 2:
        run(0, total)
        return
    edges = [min(steps * part // threads * step, total) for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, edges[:-1], edges[1:]))  # a list: errors are raised here
