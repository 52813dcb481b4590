"""Quantizes stacked expert weights, also on the meta device."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.core.errors import CheckpointError
from isotype.core.formats import FORMATS, MXFP4, why_dense
from isotype.model.boundary_choice import computes_float32, range_boundaries
from isotype.model.experts.stack import (
    NESTED,
    QuantizedStack,
    codes_of,
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
    """Return weight name -> format for each stacked weight that `policy` quantizes, without modules in `skipped`."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    formats = {}
    by_ranges = range_boundaries(model, tuple(places(model)), policy) if policy.exceptions else {}
    for path, module, name in stacked_weights(model) if policy.quantization else ():
        full = f"{path}.{name}".lstrip(".")
        storage = policy.experts or policy.storage_of(full)
        dense = is_pinned(full, policy.pinned) or not should_convert_module(path, list(skipped))
        # Experts with values beyond float16 run in PEFT's path, which is wrong for a parametrized weight.
        dense |= computes_float32(by_ranges.get(path))
        if not dense and storage in FORMATS and why_dense(shape_of(module, name), storage) is None:
            formats[full] = storage
    return formats


def store_blank(model: nn.Module, formats: Mapping[str, str], policy: PrecisionPolicy) -> None:
    """Replace stacked weights by quantized weights on the meta device. `formats` is from `formats_of_stacks`."""
    for full, storage in formats.items():
        path, _, name = full.rpartition(".")
        module = model.get_submodule(path)
        options = {"double_quant": policy.double_quant, "transposed": is_transposed(module)}
        place_stack(module, name, *blank_stack(shape_of(module, name), storage, policy.plain, **options))


def blank_stack(
    shape: torch.Size,
    storage: str,
    dtype: torch.dtype,
    *,
    double_quant: bool = False,
    transposed: bool = False,
    device: Any = "meta",
) -> tuple[torch.Tensor, QuantizedStack]:
    """Return (codes on the meta device, parametrization) of a stacked weight. `quantize_parts` describes the arguments."""
    form = FORMATS[storage]
    experts, rows, columns = shape
    options: Any = {"dtype": torch.float32, "device": device}
    if storage == MXFP4:
        rows, columns = (columns, rows) if transposed else (rows, columns)
        sizes = (experts, rows, columns // form.block, form.block // 2)
        codes = torch.empty(sizes, dtype=torch.uint8, device=device)
        constants = {"scales": torch.empty(codes.shape[:-1], dtype=torch.uint8, device=device)}
    elif storage == "int8":
        codes = torch.empty(shape, dtype=torch.int8, device=device)
        scales = torch.empty((experts, 1, columns) if transposed else (experts, rows, 1), **options)
        constants = {"scales": scales}
    else:
        from bitsandbytes.functional import get_4bit_type

        codes = torch.empty(experts, rows * columns // 2, dtype=torch.uint8, device=device)
        blocks = rows * columns // form.block
        table = get_4bit_type(form.code, device="cpu").to(device)
        constants = {"absmax": torch.empty(experts, blocks, **options), "code": table}
        if double_quant:
            constants["absmax"] = constants["absmax"].to(torch.uint8)
            constants["nested_absmax"] = torch.empty(-(-experts * blocks // NESTED), **options)
            constants["nested_code"] = torch.empty(256, **options)
            constants["offset"] = torch.empty((), **options)
    return codes, QuantizedStack(
        storage, shape, dtype, constants, blocksize=form.block, transposed=transposed
    )


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
    """Quantize a stacked weight part by part. Return (codes, parametrization).

    Args:
        parts: dense weights `[any number, d1, d2]` of successive experts.
        shape: `[experts, d1, d2]` of the whole weight. `why_dense` must return None for the shape.
        storage: `"nf4"`, `"fp4"` or `"int8"`.
        transposed: True if d1 is the number of input features, False if d2 is that number.

    Raises:
        CheckpointError: the format is mxfp4. isotype can load this format, but cannot produce it.
    """
    if storage == MXFP4:
        what = f"experts of shape {list(shape)} that are not stored in {storage}"
        expected = f"{storage} blocks"
        fix = "load the experts with quantization nf4 or int8, or without quantization"
        raise CheckpointError.of(f"weights cannot be converted to {storage}", what, expected, fix)
    blank = partial(blank_stack, shape, storage, dtype, transposed=transposed, device=device)
    codes, stack = blank()
    form, (constants,) = FORMATS[storage], stack.factors()
    for expert, matrix in enumerate(matrix.to(device, dtype) for part in parts for matrix in part):
        if storage == "int8":
            matrix_codes, scales = quantize_int8(matrix.T if transposed else matrix)
            codes[expert] = matrix_codes.T if transposed else matrix_codes
            constants[expert] = scales.view(constants.shape[1:])
        else:
            packed, state = quantize_4bit(matrix, form.code, blocksize=form.block)
            codes[expert], constants[expert] = packed.view(-1), state.absmax
    if double_quant and storage != "int8":
        stack = with_constants(blank(double_quant=True)[1], constants)
    return codes, stack


def place_quantized(
    module: nn.Module,
    name: str,
    parts: Iterable[torch.Tensor],
    storage: str,
    dtype: torch.dtype,
    **options: Any,
) -> nn.Parameter:
    """Quantize a stacked weight (see `quantize_parts`), set it as the weight `name` of a module, and return its codes."""
    options["transposed"] = is_transposed(module)
    place_stack(module, name, *quantize_parts(parts, shape_of(module, name), storage, dtype, **options))
    return codes_of(module, name)


def with_constants(blank: QuantizedStack, constants: torch.Tensor) -> QuantizedStack:
    """Return a new parametrization with the settings of `blank` and these constants.

    For int8 and mxfp4, `constants` are the scales. For nf4 and fp4, `constants` are float32 `[experts, blocks]`. If
    `blank` has 8-bit constants, this function quantizes these constants to 8 bits.
    """
    factors = {"scales": constants}
    if blank.storage not in ("int8", MXFP4):
        settings = {"shape": blank.shape, "dtype": blank.dtype, "blocksize": blank.blocksize}
        form = FORMATS[blank.storage].code
        state = state_4bit(constants.view(-1), double_quant=blank.nested, quant_type=form, **settings)
        factors = constants_4bit(state, blank.shape[0])
    size, layout = blank.blocksize, blank.transposed
    return QuantizedStack(blank.storage, blank.shape, blank.dtype, factors, blocksize=size, transposed=layout)
