"""Quantization of stacked expert weights, with or without values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from isotype.core.errors import CheckpointError
from isotype.core.formats import FORMATS, MXFP4, why_dense
from isotype.model.boundary_choice import computes_float32, range_boundaries
from isotype.model.experts.stack import (
    NESTED,
    QuantizedStack,
    constants_4bit,
    is_transposed,
    place_stack,
    shape_of,
    stacked_weights,
)
from isotype.model.quantize import quantize_4bit, quantize_int8, state_4bit
from isotype.model.walk import places
from isotype.precision.policy import PrecisionPolicy, is_pinned


def formats_of_stacks(
    model: nn.Module, policy: PrecisionPolicy, skipped: Sequence[str] = ()
) -> dict[str, str]:
    """Return the name of each stacked expert weight quantized under a policy -> its format.

    `skipped`: names of modules that are not quantized, as for transformers' quantizers. The model may be on
    the meta device.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    formats = {}
    by_ranges = range_boundaries(model, tuple(places(model)), policy) if policy.exceptions else {}
    for path, module, name in stacked_weights(model) if policy.quantization else ():
        full = f"{path}.{name}".lstrip(".")
        storage = policy.experts or policy.storage_of(full)
        kept = is_pinned(full, policy.pinned) or not should_convert_module(path, list(skipped))
        # Values beyond float16: such experts use PEFT's path, which is wrong on a parametrized weight.
        kept |= computes_float32(by_ranges.get(path))
        if not kept and storage in FORMATS and why_dense(shape_of(module, name), storage) is None:
            formats[full] = storage
    return formats


def store_blank(model: nn.Module, formats: Mapping[str, str], policy: PrecisionPolicy) -> None:
    """Store stacked weights without values in the formats of `formats_of_stacks`."""
    for full, storage in formats.items():
        path, _, name = full.rpartition(".")
        module = model.get_submodule(path)
        turned, shape = is_transposed(module), shape_of(module, name)
        double = policy.double_quant
        blank = blank_stack(shape, storage, policy.plain, double_quant=double, transposed=turned)
        place_stack(module, name, *blank)


def blank_stack(
    shape: torch.Size,
    storage: str,
    dtype: torch.dtype,
    *,
    double_quant: bool = False,
    transposed: bool = False,
    device: Any = "meta",
) -> tuple[torch.Tensor, QuantizedStack]:
    """Return codes and parametrization of a stacked weight without values; arguments as of `quantize_parts`."""
    form = FORMATS[storage]
    experts, rows, columns = shape
    if storage == MXFP4:
        rows, columns = (columns, rows) if transposed else (rows, columns)
        sizes = (experts, rows, columns // form.block, form.block // 2)
        codes = torch.empty(sizes, dtype=torch.uint8, device=device)
        scales = torch.empty(codes.shape[:-1], dtype=torch.uint8, device=device)
        return codes, QuantizedStack(storage, shape, dtype, {"scales": scales}, transposed=transposed)
    if storage == "int8":
        codes = torch.empty(shape, dtype=torch.int8, device=device)
        scales = torch.empty((experts, 1, columns) if transposed else (experts, rows, 1), device=device)
        return codes, QuantizedStack(storage, shape, dtype, {"scales": scales}, transposed=transposed)
    codes = torch.empty(experts, rows * columns // 2, dtype=torch.uint8, device=device)
    blocks = rows * columns // form.block
    constants = {"absmax": torch.empty(experts, blocks, device=device), "code": _table(form.code, device)}
    if double_quant:
        constants["absmax"] = constants["absmax"].to(torch.uint8)
        constants["nested_absmax"] = torch.empty(-(-experts * blocks // NESTED), device=device)
        constants["nested_code"] = torch.empty(256, device=device)
        constants["offset"] = torch.empty((), device=device)
    size = form.block
    return codes, QuantizedStack(storage, shape, dtype, constants, blocksize=size, transposed=transposed)


def _table(code: str, device: Any) -> torch.Tensor:
    from bitsandbytes.functional import get_4bit_type

    table: torch.Tensor = get_4bit_type(code, device="cpu")
    return table.to(device)


def quantize_parts(
    parts: Iterable[torch.Tensor],
    shape: torch.Size,
    storage: str,
    dtype: torch.dtype,
    *,
    double_quant: bool = False,
    transposed: bool = False,
    device: Any = "cpu",
) -> tuple[torch.Tensor, QuantizedStack]:
    """Return codes and parametrization of a stacked weight that arrives in parts.

    Args:
        parts: dense `[some, d1, d2]`, in the order of experts.
        shape: of the whole weight, `[experts, d1, d2]`, for which `why_dense` returns None.
        storage: `"nf4"`, `"fp4"` or `"int8"`.
        dtype: of the values before quantization and after dequantization.
        double_quant: whether the constants of 4 bits are quantized too.
        transposed: whether the input dimension is `d1`.
        device: of the codes.

    Raises:
        CheckpointError: the format is mxfp4, in which weights are loaded but not quantized.
    """
    form = FORMATS[storage]
    if storage == MXFP4:
        what = f"experts of shape {list(shape)} that are not stored in {storage}"
        expected = f"{storage} blocks"
        fix = "load them with quantization nf4 or int8, or with none"
        raise CheckpointError.of(f"weights cannot be converted to {storage}", what, expected, fix)
    codes, stack = blank_stack(shape, storage, dtype, transposed=transposed, device=device)
    constants: Any = stack.scales if storage == "int8" else stack.absmax
    matrices = (matrix for part in parts for matrix in part)
    for expert, matrix in enumerate(matrices):
        matrix = matrix.to(device, dtype)
        if storage == "int8":
            matrix_codes, scales = quantize_int8(matrix.T if transposed else matrix)
            codes[expert] = matrix_codes.T if transposed else matrix_codes
            constants[expert] = scales.view(constants.shape[1:])
        else:
            packed, state = quantize_4bit(matrix, form.code, blocksize=form.block)
            codes[expert], constants[expert] = packed.view(-1), state.absmax
    if double_quant and storage != "int8":
        blank = blank_stack(shape, storage, dtype, double_quant=True, transposed=transposed, device=device)[1]
        stack = with_constants(blank, constants)
    return codes, stack


def with_constants(blank: QuantizedStack, constants: torch.Tensor) -> QuantizedStack:
    """Return a parametrization like `blank` with values.

    `constants`: float32 of the blocks of nf4 and fp4 `[experts, blocks]`, quantized if those of `blank` are;
    else scales.
    """
    held = {"scales": constants}
    if blank.storage not in ("int8", MXFP4):
        form = FORMATS[blank.storage]
        state = state_4bit(
            constants.view(-1),
            double_quant=blank.nested,
            shape=blank.shape,
            dtype=blank.dtype,
            blocksize=blank.blocksize,
            quant_type=form.code,
        )
        held = constants_4bit(state, blank.shape[0])
    size, turned = blank.blocksize, blank.transposed
    return QuantizedStack(blank.storage, blank.shape, blank.dtype, held, blocksize=size, transposed=turned)
