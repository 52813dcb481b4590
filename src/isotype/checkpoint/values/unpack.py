"""Dense values of tensors that a checkpoint holds quantized."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.stored import StoredTensor
from isotype.checkpoint.values.gguf_values import unpack_blocks
from isotype.core.errors import CheckpointError

Read = Callable[[TensorHeader], torch.Tensor]

# The 16 values of an OCP MXFP4 code: sign, two bits of exponent, one of mantissa (OCP MX specification 1.0, 5.3.3).
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MXFP4 = torch.cat([_E2M1, -_E2M1])
_PIECE = 1 << 19
"""Elements that are dequantized at a time: they stay in the caches, and are enough for all of torch's threads."""


@dataclass(frozen=True)
class Packing:
    """What config.json says of how weights are quantized.

    Attributes:
        block: rows and columns of a weight that share a scale; None where its shape says it.
        bits: of a packed integer.
        symmetric: whether packed integers have no zero points.
    """

    block: tuple[int, int] | None = None
    bits: int = 4
    symmetric: bool = True


def packing_of(config: Any) -> Packing:
    """The packing that a transformers config describes."""
    quantization = getattr(config, "quantization_config", None) or {}
    options: Mapping[str, Any] = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    block = options.get("weight_block_size")
    groups = list((options.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if groups else {}
    group = weights.get("group_size") or 0
    block = block or weights.get("block_structure") or ([1, group] if group > 0 else None)
    return Packing(
        (block[0], block[1]) if block else None,
        int(weights.get("num_bits", 4)),
        bool(weights.get("symmetric", True)),
    )


def dense(tensor: StoredTensor, read: Read, dtype: torch.dtype, packing: Packing) -> torch.Tensor:
    """The values of a stored tensor.

    Args:
        tensor: as the checkpoint holds it.
        read: gives the tensor of a header.
        dtype: what computed values are rounded to; values that are stored plainly keep their dtype.
        packing: what the config says of its quantization.

    Raises:
        CheckpointError: it is quantized in a way that is not known here.
    """
    if not tensor.quantized:
        return read(tensor.weight)
    if tensor.weight.dtype is None and not tensor.constants:
        return unpack_blocks(tensor.weight, read(tensor.weight))
    constants = {part.name.rpartition(".")[2]: read(part) for part in tensor.constants}
    scales = [
        value for name, value in constants.items() if name.endswith(("_scale", "_scale_inv", "_scales"))
    ]
    weight = read(tensor.weight)
    if tensor.form == "mxfp4" and len(scales) == 1:
        return _mxfp4(weight, scales[0], dtype)
    if tensor.form == "packed" and len(scales) == 1 and set(constants) <= {"weight_scale", "weight_shape"}:
        shape = constants["weight_shape"].tolist()
        return _scaled(_unpacked(weight, packing.bits, shape), scales[0], dtype, packing.block)
    scaled = weight.dtype == torch.int8 or (weight.dtype.itemsize == 1 and weight.is_floating_point())
    if scaled and len(scales) == 1 and packing.symmetric:
        return _scaled(weight, scales[0], dtype, packing.block)
    raise CheckpointError.of(
        "a quantization that isotype cannot undo",
        f"{tensor.weight.name} ({tensor.weight.dtype_name}) with {', '.join(constants) or 'no constants'} "
        f"in {tensor.weight.file.name}",
        "mxfp4 with scales, FP8 or int8 with scales, or packed integers without zero points",
        "load it with transformers and save_pretrained() it dense, or take the checkpoint before it was quantized",
    )


def _mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., columns, rows] of blocks [..., rows, groups, bytes] and exponents [..., rows, groups].

    A byte holds two values, the lower half first; a group of 32 shares the factor 2 ** (exponent - 127).
    """
    *outer, rows, groups, width = blocks.shape
    columns = groups * width * 2
    # Two digits times a power of two: bfloat16 has every such number that float32 has.
    work = dtype if dtype == torch.bfloat16 else torch.float32
    pairs = torch.stack([_MXFP4.repeat(16), _MXFP4.repeat_interleave(16)], dim=1).to(work)  # [256, 2]
    words = pairs.view(torch.int32 if work.itemsize == 2 else torch.int64).view(256)  # a pair in one
    values = torch.empty(*outer, columns, rows, dtype=dtype)
    step = max(1, _PIECE // columns)
    for block, scale, target in zip(
        blocks.view(-1, rows, groups * width),
        scales.view(-1, rows, groups, 1),
        values.view(-1, columns, rows),
        strict=True,
    ):
        for first in range(0, rows, step):
            codes = block[first : first + step].reshape(-1).to(torch.int32)
            piece = words.index_select(0, codes).view(work).view(-1, groups, width * 2)
            piece *= _factors(scale[first : first + step]).to(work)
            target[:, first : first + step] = piece.view(-1, columns).T
    return values


def _scaled(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] | None
) -> torch.Tensor:
    """codes x scale: one scale for all, for each row, for each group of a row or each block of rows and columns."""
    *outer, rows, columns = codes.shape
    factors = _factors(scales)
    grid = factors.reshape(-1, *factors.shape[-2:]) if factors.dim() >= 2 else factors.reshape(1, -1, 1)
    height = block[0] if block else -(-rows // grid.shape[1])
    width = block[1] if block else -(-columns // grid.shape[2])
    values = torch.empty(codes.shape, dtype=dtype)
    step = max(1, _PIECE // max(1, columns))
    line = torch.arange(rows) // height
    for part, target, factor in zip(
        codes.view(-1, rows, columns),
        values.view(-1, rows, columns),
        grid.expand(max(1, math.prod(outer)), -1, -1),
        strict=True,
    ):
        wide = factor.repeat_interleave(width, dim=1)[:, :columns] if width < columns else factor
        for first in range(0, rows, step):
            piece = _float32(part[first : first + step])
            target[first : first + step] = piece.mul_(wide.index_select(0, line[first : first + step]))
    return values


def _float32(codes: torch.Tensor) -> torch.Tensor:
    """Codes as numbers. Those of float8 are looked up: torch converts them one by one."""
    if not codes.is_floating_point():
        return codes.to(torch.float32)
    table = _table(codes.dtype)
    places = codes.contiguous().view(torch.uint8).view(-1).to(torch.int32)
    return table.index_select(0, places).view(codes.shape)


@functools.cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def _factors(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32 numbers; bytes are exponents of two (E8M0)."""
    if scales.dtype == torch.uint8:
        # The exponent of a float32, whose bias is the same; 2 ** -127 is a denormal number.
        exponents = scales.to(torch.int32)
        return torch.where(exponents == 0, 1 << 22, exponents << 23).to(torch.int32).view(torch.float32)
    return scales.to(torch.float32)


def _unpacked(words: torch.Tensor, bits: int, shape: list[int]) -> torch.Tensor:
    """int8 [rows, columns] of int32 words [rows, columns x bits / 32], lowest bits first, that are offset by half."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (codes - (1 << (bits - 1))).to(torch.int8).flatten(-2)[..., : shape[-1]]
