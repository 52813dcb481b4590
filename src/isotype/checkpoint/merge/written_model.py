"""A merged model that was written, opened again: its logits, and its weights as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.deferred import Block, DeferredBlocks
from isotype.checkpoint.load import load, without_bars
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.values.dequantize import held_weight
from isotype.core.dtypes import GGUF_BLOCKS, GGUF_TYPES, LLAMA_CPP_TYPES
from isotype.core.formats import QUANTIZATIONS
from isotype.core.pretrained import pretrained
from isotype.model.walk import kind_of


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
