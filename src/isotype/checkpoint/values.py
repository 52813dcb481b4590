"""Dequantizes the weights of quantized checkpoints, of GGUF blocks (with the library gguf) and of loaded layers."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.schemes import EXPECTED
from isotype.checkpoint.mapping.stored import StoredTensor
from isotype.checkpoint.mapping.weight_map import Source, gguf_names
from isotype.compat.torch import own_parameters
from isotype.compat.transformers import conversions, set_conversions
from isotype.core.errors import CheckpointError, Problem
from isotype.model.experts import mxfp4
from isotype.model.experts.stack import QuantizedStack, quantized_stack, stacked_weights, take_stack
from isotype.model.quantized import dense_layer, dense_weight, replaces_conv1d
from isotype.model.walk import places

Read = Callable[[TensorHeader], torch.Tensor]

_PIECE = 1 << 19
"""Number of elements that are dequantized at a time: small enough for the caches of the CPU, and large enough for all threads of torch."""
_GGUF_PIECE = 1 << 17
"""Number of elements that gguf dequantizes at a time. With the temporaries of gguf, they fit into the caches of the CPU."""
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight neighboring columns in the int32 word into which AutoAWQ packs them."""


def dense(tensor: StoredTensor, read: Read, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a stored tensor, in `dtype` if it is quantized. Raise CheckpointError for an unknown quantization."""
    scheme = tensor.scheme
    if not tensor.quantized:
        return read(tensor.weight)
    if tensor.weight.dtype is None and tensor.problem is None:
        return unpack_blocks(tensor.weight, read(tensor.weight))
    if scheme is None:
        what = f"a dense layer with the quantized weight {tensor.weight.name} ({tensor.form})"
        problem = tensor.problem or Problem(what, *EXPECTED)
        raise CheckpointError("a weight that isotype cannot dequantize", [problem])
    codes, scales = read(tensor.weight), read(scheme.scale)
    if scheme.kind == "blocks":
        return mxfp4.unpack(codes, scales, dtype, True)
    # uint8 scales are exponents of two (E8M0).
    factors = mxfp4.powers(scales) if scales.dtype == torch.uint8 else scales.to(torch.float32)
    if scheme.second is not None:
        second = read(scheme.second).to(torch.float32)
        factors = factors / second if scheme.divides else factors * second
    zeros = None if scheme.zero is None else read(scheme.zero)
    if scheme.transposed and zeros is not None:
        codes = _unpacked(codes, scheme.bits, scheme.shape[::-1], _AWQ)
        zeros = _unpacked(zeros, scheme.bits, scales.shape, _AWQ)
        return _scaled(codes, factors, dtype, scheme.block[::-1], zeros).T.contiguous()
    if zeros is not None and zeros.dtype == torch.int32 and scheme.kind == "words":
        rows = (*scheme.shape[:-2], scales.shape[-1], scheme.shape[-2])
        zeros = _unpacked(zeros.transpose(-1, -2), scheme.bits, rows).transpose(-1, -2)
    if scheme.kind == "words":
        codes = _unpacked(codes, scheme.bits, scheme.shape)
    elif scheme.kind == "E2M1":
        codes = torch.stack([codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4], dim=-1).flatten(-2)
        return _scaled(codes, factors, dtype, scheme.block, table=mxfp4.E2M1)
    return _scaled(codes, factors, dtype, scheme.block, zeros)


def _scaled(
    codes: torch.Tensor,
    factors: torch.Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    zeros: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (codes - zeros) x factors. Each `block` of rows and columns has one factor. `table` decodes uint8 codes."""
    *outer, rows, columns = (1, *codes.shape)[-max(2, codes.dim()) :]
    (height, width), count = block, math.prod(outer)
    grid = (-1, -(-rows // height), -(-columns // width))
    values = torch.empty(codes.shape, dtype=dtype)
    step = max(1, _PIECE // max(1, columns))
    line = torch.arange(rows) // height

    def wide(grid: torch.Tensor) -> torch.Tensor:
        return grid.repeat_interleave(width, dim=1)[:, :columns] if 1 < grid.shape[1] < columns else grid

    for part, target, factor, zero in zip(
        codes.reshape(-1, rows, columns),
        values.view(-1, rows, columns),
        factors.reshape(grid).expand(count, -1, -1),
        [None] * count if zeros is None else zeros.to(torch.float32).reshape(grid).expand(count, -1, -1),
        strict=True,
    ):
        factor = wide(factor)
        zero = None if zero is None else wide(zero)
        for first in range(0, rows, step):
            these = line[first : first + step]
            piece = _float32(part[first : first + step], table)
            if zero is not None:
                piece -= zero.index_select(0, these)
            target[first : first + step] = piece.mul_(factor.index_select(0, these))
    return values


def _float32(codes: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """Return codes as float32 numbers. A table converts float8 codes faster than torch."""
    if table is None and not codes.is_floating_point():
        return codes.to(torch.float32)
    values = _table(codes.dtype) if table is None else table
    places = codes.contiguous().view(torch.uint8).view(-1).to(torch.int32)
    return values.index_select(0, places).view(codes.shape)


@functools.cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def _unpacked(
    words: torch.Tensor, bits: int, shape: Sequence[int], order: Sequence[int] = (0,)
) -> torch.Tensor:
    """Unpack codes from int32 words, and subtract half of the range of the codes. Return int8 of `shape`.

    A code may continue in the next word. `order`: for each column that shares a word, its position in the word. The
    number of columns must be a multiple of `len(order)`.
    """
    begin = (torch.arange(0, shape[-1], len(order))[:, None] + torch.tensor(order)).flatten() * bits
    place, shift = begin // 32, begin % 32
    codes = torch.empty(math.prod(shape[:-1]), shape[-1], dtype=torch.int8)
    step = max(1, _PIECE // max(1, shape[-1]))
    flat = words.reshape(-1, words.shape[-1])
    for first in range(0, len(flat), step):
        wide = flat[first : first + step].to(torch.int64) & 0xFFFFFFFF
        wide = torch.nn.functional.pad(wide, (0, 1))
        pair = wide.index_select(-1, place) | wide.index_select(-1, place + 1) << 32
        codes[first : first + step] = (pair >> shift & (1 << bits) - 1) - (1 << bits - 1)
    return codes.view(*shape)


ConvertGguf = Callable[[Source, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


def unpack_blocks(header: TensorHeader, raw: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of a block-quantized tensor, bitwise equal to `gguf.quants.dequantize`."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[header.dtype_name]
    columns = header.shape[-1] if header.shape else 1
    rows = max(1, header.elements // columns)
    blocks = raw.numpy().reshape(rows, -1)
    values = np.empty((rows, columns), np.float32)
    step = max(1, _GGUF_PIECE // columns)

    def piece(first: int) -> None:
        values[first : first + step] = dequantize(blocks[first : first + step], kind)

    with ThreadPoolExecutor(max(1, min(torch.get_num_threads(), rows // (4 * step)))) as pool:
        list(pool.map(piece, range(0, rows, step)))  # list() raises the threads' errors here
    return torch.from_numpy(values).view(header.shape)


def gguf_conversion(model: Any, headers: CheckpointHeaders) -> ConvertGguf | None:
    """Return a function that converts GGUF tensors by transformers' `TensorProcessor`; None for other files."""
    if headers.format != "gguf":
        return None
    from transformers import modeling_gguf_pytorch_utils as gguf

    architecture, config = headers.architecture, model.config.to_dict()
    processor = gguf.TENSOR_PROCESSORS.get(architecture, gguf.TensorProcessor)(config=config)
    names = dict(gguf_names(model, architecture))

    def convert_gguf(source: Source, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # The processor stacks experts in `tensors`, and returns every other tensor.
        tensors: dict[str, torch.Tensor] = {}
        for tensor, _ in source.tensors:
            result = processor.process(
                weights=values[tensor.name].float().numpy(),
                name=tensor.weight.name,
                tensor_key_mapping=names,
                parsed_parameters={"tensors": tensors, "config": config},
            )
            if result.name is not None:
                tensors[source.target] = torch.from_numpy(np.ascontiguousarray(result.weights))
        return tensors

    return convert_gguf


@dataclass(frozen=True)
class DenseWeight:
    """A dense weight that replaces a quantized weight, with its `name` in the model and the `module` that contains
    it.

    `values` dequantizes the quantized weight to a dtype. `layer` is the bitsandbytes layer that `module` replaces, or None
    for stacked experts.
    """

    name: str
    module: Any
    values: Callable[[torch.dtype], torch.Tensor]
    layer: Any = None

    @property
    def dtype(self) -> torch.dtype:
        """Current dtype of the parameter. It may change between the model's dequantization and `read`."""
        parameter = own_parameters(self.module)[self.name.rpartition(".")[2]]
        assert parameter is not None
        return parameter.dtype

    def read(self, dtype: torch.dtype) -> None:
        self.put(self.values(dtype))

    def put(self, weight: torch.Tensor) -> None:
        own_parameters(self.module)[self.name.rpartition(".")[2]] = nn.Parameter(weight, requires_grad=False)


def _of_stack(
    module: Any, name: str, codes: torch.Tensor, stack: QuantizedStack, dtype: torch.dtype
) -> torch.Tensor:
    """Return dequantized values on the CPU. They come from the module's stack, or from `codes` if the module has no stack now."""
    if quantized_stack(module, name) is not None:
        computes_in = stack.dtype
        codes, stack = take_stack(module, name)
        stack.dtype = computes_in
    values: torch.Tensor = stack(codes)
    return values.to("cpu", dtype)


def dequantize(
    model: Any, dtype: torch.dtype, later: Callable[[DenseWeight], bool] = lambda _: False
) -> None:
    """Replace bitsandbytes layers and quantized experts by dense layers on the CPU with the dequantized weights.

    Args:
        model: a transformers model, changed in place if it is quantized.
        dtype: dtype of the dense weights. 4-bit layers are first dequantized to the dtype of their quantization state. int8
            layers are first dequantized to float32 (code x constant / 127, LLM.int8, https://arxiv.org/abs/2208.07339).
        later: function of a dense weight. If it returns True, the weight stays on the meta device, and the caller reads it
            later.
    """
    quantized = [weight for weight in stacked_weights(model) if quantized_stack(*weight[1:]) is not None]
    for path, module, name in quantized:
        codes, stack = take_stack(module, name)
        values = functools.partial(_of_stack, module, name, codes, stack)
        dense = DenseWeight(f"{path}.{name}", module, values)
        dense.put(torch.empty(stack.shape, dtype=dtype, device="meta"))
        if not later(dense):
            dense.read(dtype)
    if quantized:
        set_conversions(model, None)  # for quantized stacks, other conversions were set
    for place in list(places(model)):
        if place.kind not in ("linear4bit", "linear8bit"):
            continue
        layer: Any = place.module
        linear: Any = dense_layer(layer, dtype)
        if layer.bias is not None:
            linear.bias = nn.Parameter(layer.bias.data.to("cpu"), requires_grad=False)
        dense = DenseWeight(f"{place.name}.weight", linear, functools.partial(held_weight, layer), layer)
        if not later(dense):
            dense.read(dtype)
        model.set_submodule(place.name, linear)
    _forget_bnb(model)


def held_weight(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the dense weight on the CPU in the layout of the layer's class: `[in, out]` for Conv1D, else `[out, in]`."""
    weight = dense_weight(layer).to("cpu", dtype)
    return weight.T.contiguous() if replaces_conv1d(layer) else weight


def _forget_bnb(model: Any) -> None:
    """Move a dequantized model to the CPU, and remove transformers' record that bitsandbytes quantized it."""
    from transformers.integrations import bitsandbytes as integration

    if getattr(model, "hf_quantizer", None) is None:
        return
    for value in (*model.parameters(), *model.buffers()):
        if not value.is_meta:
            value.data = value.data.to("cpu")
    model.hf_quantizer.remove_quantization_config(model)
    # Saving reverses the conversions of loading; bitsandbytes' conversions have no reverse (transformers 5.23).
    recorded = conversions(model)
    if recorded is not None:
        others = [
            conversion
            for conversion in recorded
            if integration.__name__ not in {type(s).__module__ for s in getattr(conversion, "operations", ())}
        ]
        set_conversions(model, others)
