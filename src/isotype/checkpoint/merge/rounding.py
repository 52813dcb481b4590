"""A merged weight as a form stores it, and the weights of a written merged model."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.deferred import Block, DeferredBlocks
from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.values import held_weight
from isotype.compat.bitsandbytes import dequantize_4bit
from isotype.compat.transformers import without_bars
from isotype.core.dtypes import GGUF_BLOCKS, GGUF_TYPES, LLAMA_CPP_TYPES, parse_dtype
from isotype.core.formats import FOUR_BITS, QUANTIZATIONS
from isotype.core.pretrained import pretrained
from isotype.model.quantize import quantize_4bit, quantize_int8
from isotype.model.walk import kind_of

# Bytes of a block before its codes of 4 or 8 bits.
_SCALES = {"q8_0": 2, "q5_1": 8, "q5_0": 6, "q4_1": 4, "q4_0": 2}
_DROPPED = {torch.bfloat16: 16, torch.float16: 13}  # of float32's 23 digits, in binary


def unbiased(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 values up or down at random, so that they are right on average.

    The base's 16-bit values are on the dtype's grid. Rounded to nearest, an update below half a step is lost in every
    entry; this way it is kept in the mean of each product. Values on the grid are exact. The random numbers depend
    only on the weight's name. (Stochastic rounding: Gupta et al., https://arxiv.org/abs/1502.02551.)
    """
    dropped = _DROPPED.get(dtype)
    if dropped is None or values.dtype != torch.float32:
        return values.to(dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bits = torch.randint(1 << dropped, values.shape, generator=generator, dtype=torch.int32)
    bits += values.contiguous().view(torch.int32)
    return bits.bitwise_and_(-1 << dropped).view(torch.float32).to(dtype)


def as_stored(name: str, layer: nn.Module, values: torch.Tensor, form: str) -> torch.Tensor:
    """Return a merged float32 parameter rounded to a form: a float dtype, bitsandbytes' or GGUF blocks."""
    if form in QUANTIZATIONS:
        return _in_bitsandbytes(layer, values, form)
    if form not in GGUF_BLOCKS:
        return unbiased(name, values, parse_dtype(form))
    if values.ndim < 2 or values.shape[-1] % 32:
        return values
    import gguf

    kind = gguf.GGMLQuantizationType[form.upper()]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(values.contiguous().numpy(), kind), kind))


def _in_bitsandbytes(layer: nn.Module, values: torch.Tensor, form: str) -> torch.Tensor:
    turned = type(layer).__name__ == "Conv1D"
    if values.ndim != 2 or not (turned or isinstance(layer, nn.Linear)):
        return values
    rows = (values.T if turned else values).contiguous()
    if form == "int8":
        codes, scales = quantize_int8(rows)
        result = codes.float() * (scales / 127).unsqueeze(1)
    else:
        result = dequantize_4bit(*quantize_4bit(rows, form)).float()
    return result.T.contiguous() if turned else result


def codes(values: torch.Tensor, form: str) -> torch.Tensor:
    """Return the codes of a float32 matrix in a form, one of 4 or 8 bits per byte or half byte."""
    if form == "int8":
        return quantize_int8(values)[0].flatten()
    if form in FOUR_BITS:
        packed = quantize_4bit(values.contiguous(), form)[0].flatten()
    else:
        import gguf

        kind = gguf.GGMLQuantizationType[form.upper()]
        _, size = gguf.GGML_QUANT_SIZES[kind]
        stored = torch.from_numpy(gguf.quantize(values.contiguous().numpy(), kind)).view(-1, size)
        packed = stored[:, _SCALES[form] :].flatten()
        if form == "q8_0":
            return packed
    return torch.stack([packed >> 4, packed & 15], 1).flatten()


class WrittenModel:
    """A merged model in its files.

    Plain transformers opens it; a GGUF file, which it would load into float32 as a whole, is read block by block.

    Args:
        path: the directory, or the GGUF file.
        stored: as in `isotype.checkpoint.merge.merge.merge_adapter`.

    Attributes:
        model: the model, ready for a forward.
    """

    def __init__(self, model_class: Any, path: Path, stored: str | None) -> None:
        self._blocks: dict[str, Block] = {}
        self._deferred = DeferredBlocks()
        self._coded = stored in (*QUANTIZATIONS, *GGUF_BLOCKS, *LLAMA_CPP_TYPES)
        self._stored = stored
        self._dtype = None if stored is None else GGUF_TYPES.get(stored)
        if stored not in GGUF_TYPES:
            with without_bars():
                self.model = pretrained(model_class, path, dtype="auto")
            return
        policy = resolve_precision(path, "float32", device="cpu")
        self.model = load(path, policy, model_class=model_class, deferred=self._deferred)
        self._deferred.on_forward()
        self._blocks = {name: block for block in self._deferred.blocks for name in block.sources}

    def form_of(self, name: str, values: torch.Tensor) -> str | None:
        """Return the format of a weight's codes; None if it is in a dtype, or in a mixture of formats."""
        if self._stored in QUANTIZATIONS:
            return self._stored if self._in_codes(name) else None
        blocks = self._stored in GGUF_BLOCKS and name in self._blocks and values.shape[-1] % 32 == 0
        return self._stored if blocks else None

    @torch.no_grad()
    def values(self, name: str) -> tuple[torch.dtype | None, torch.Tensor]:
        """Return the stored dtype of a parameter (None for codes) and its float32 values; drops the previous block."""
        self._deferred.use(self._blocks.get(name))
        if self._in_codes(name):
            return None, held_weight(self.model.get_submodule(name.removesuffix(".weight")), torch.float32)
        value = self.model.get_parameter(name).detach()
        if self._dtype is None:
            return value.dtype, value.to("cpu", torch.float32)
        if value.ndim < 2:  # vectors of a GGUF file
            return torch.float32, value
        return None if self._coded else self._dtype, value

    def _in_codes(self, name: str) -> bool:
        """Return True if a parameter is the matrix of a quantized bitsandbytes layer; its bias is dense."""
        owner, _, own = name.rpartition(".")
        return own == "weight" and kind_of(self.model.get_submodule(owner)) in ("linear4bit", "linear8bit")
