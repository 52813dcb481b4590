"""A merged weight as a form stores it, and the weights of a merged model that was written."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.deferred import Block, DeferredBlocks
from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.values.dequantize import held_weight
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
    """Float32 values in a dtype, each rounded up or down with the probability that leaves it right on average.

    A base in 16 bits lies on the grid of that dtype. Rounded to the nearest, an update below half a step is lost in every entry; so it stays
    in the mean of each product. What lies on the grid stays there. The draws are the same for every weight of a name.
    (Stochastic rounding: Gupta et al., https://arxiv.org/abs/1502.02551.)
    """
    dropped = _DROPPED.get(dtype)
    if dropped is None or values.dtype != torch.float32:
        return values.to(dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bits = torch.randint(1 << dropped, values.shape, generator=generator, dtype=torch.int32)
    bits += values.contiguous().view(torch.int32)
    return bits.bitwise_and_(-1 << dropped).view(torch.float32).to(dtype)


def as_stored(name: str, layer: nn.Module, values: torch.Tensor, form: str) -> torch.Tensor:
    """The values that a merged float32 parameter of a layer has in a form: a float dtype, one of bitsandbytes or of GGUF in blocks."""
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
    """The codes of a float32 matrix in a form, without the constants that they are multiplied with: one of 4 or 8 bits a byte or half of it."""
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
    """A merged model as its files hold it.

    Plain transformers opens it; a GGUF file, which that would hold in float32 as a whole, is read block by block.

    Args:
        model_class: of the merged model.
        path: the directory, or the GGUF file.
        stored: as in `isotype.checkpoint.merge.merge.merge_adapter`.

    Attributes:
        model: it, ready for a forward.
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
        """The format in whose codes a weight is stored; None where it is in a dtype, or in a mixture of formats."""
        if self._stored in QUANTIZATIONS:
            return self._stored if self._in_codes(name) else None
        blocks = self._stored in GGUF_BLOCKS and name in self._blocks and values.shape[-1] % 32 == 0
        return self._stored if blocks else None

    @torch.no_grad()
    def values(self, name: str) -> tuple[torch.dtype | None, torch.Tensor]:
        """The dtype that a parameter is stored in, None for codes, and its values in float32.

        Those of one block after the other: the one before is dropped.
        """
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
        """Whether a parameter is the matrix of a quantized layer of bitsandbytes; its bias is dense."""
        owner, _, own = name.rpartition(".")
        return own == "weight" and kind_of(self.model.get_submodule(owner)) in ("linear4bit", "linear8bit")
