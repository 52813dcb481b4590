"""Reads the weights of a checkpoint one at a time, by the model's names."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.fill import read_source, rows_of
from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.formats.mapped import MappedFiles
from isotype.checkpoint.mapping.stored import StoredTensor, main_form
from isotype.checkpoint.mapping.weight_map import FROM_GGUF, Source, WeightMap, weight_map
from isotype.checkpoint.values import gguf_conversion
from isotype.checkpoint.weightless import skeleton
from isotype.core.errors import CheckpointError
from isotype.core.formats import MXFP4


class StoredWeights:
    """Reads a checkpoint's tensors by their names in `model`.

    When a tensor is read, transformers' conversions (`transformers.core_model_loading`) rename, split, stack or
    transpose it. Quantized tensors are dequantized.

    Args:
        weights: result of `weight_map(model, headers)`, if it is known.

    Attributes:
        bytes_read: number of bytes that `read_rows` has read from the files so far.
    """

    def __init__(self, model: Any, headers: CheckpointHeaders, weights: WeightMap | None = None) -> None:
        self._model = model
        self.bytes_read = 0
        self._sources = (weights or weight_map(model, headers)).sources
        self._convert_gguf = gguf_conversion(model, headers)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Name -> shape, for each tensor of the model that the checkpoint has. Read it before the model is quantized."""
        state = self._model.state_dict(keep_vars=True)
        # The headers of a GGUF file do not determine the shapes after its conversion, so these are taken from the model.
        shapes = {
            name: state[name].shape if source.conversion is FROM_GGUF else source.shapes.get(name)
            for name, source in self._sources.items()
        }
        return {name: torch.Size(shape) for name, shape in shapes.items() if shape is not None}

    def in_other_dtypes(self, quantized: Collection[str]) -> dict[str, torch.dtype]:
        """Return name -> dtype for float tensors outside of `quantized` that have another dtype than most tensors."""
        tensors = {name: source.tensors for name, source in self._sources.items() if name not in quantized}
        plain = {n: parts[0][0] for n, parts in tensors.items() if all(part.plain for part, _ in parts)}
        main = main_form(plain.values())
        others = {name: tensor.weight.dtype for name, tensor in plain.items() if tensor.form != main}
        return {name: dtype for name, dtype in others.items() if dtype is not None and dtype.itemsize > 1}

    def stored(self, name: str) -> StoredTensor:
        """Return the first of the stored tensors from which the model's tensor `name` is made."""
        return self._sources[name].tensors[0][0]

    def read(self, name: str) -> torch.Tensor:
        """Return the model's tensor `name`: memory-mapped in its stored dtype, or in float32 if it was quantized."""
        return self._read(self._sources[name])[name]

    def read_rows(self, name: str, start: int, stop: int, dim: int = 0) -> torch.Tensor:
        """Return rows `start` to `stop` (columns, if `dim` is 1) of `read(name)`.

        The whole tensor is read if its rows cannot be made from a part of the files (see `rows_of` in fill.py).
        """
        source = self._sources[name]
        where = (slice(None),) * dim + (slice(start, stop),)
        if start == stop:
            shape = list(self.shapes[name])
            shape[dim] = 0
            return torch.empty(shape)
        if source.conversion is None and not source.tensors[0][0].quantized:
            # Only the pages of the rows are read from the disk.
            plain = MappedFiles().tensor(source.tensors[0][0].weight)[where].clone()
            self.bytes_read += plain.nbytes
            return plain
        size = self.shapes[name]
        part = rows_of(self._model, source, name, size, start, stop) if size and not dim else None
        rows = self._read(part or source).get(name)
        if rows is None or (part and rows.shape != (stop - start, *size[1:])):
            part, rows = None, self._read(source)[name]
        self.bytes_read += sum(header.bytes for t, _ in (part or source).tensors for header in t.parts)
        return rows if part else rows[where].clone()

    def read_packed(self, name: str, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mxfp4 codes and scales of experts `start` to `stop`; raise CheckpointError for another format."""
        tensor = self.stored(name)
        if tensor.form != MXFP4 or tensor.problem is not None:
            fix = "load the model with quantization nf4 or int8, or without quantization"
            what = f"{name}, stored in {tensor.form}"
            raise CheckpointError.of("experts that are not in mxfp4", what, "blocks of mxfp4", fix)
        files = MappedFiles()
        blocks, scales = (files.tensor(part)[start:stop].clone() for part in tensor.parts)
        self.bytes_read += blocks.nbytes + scales.nbytes
        return blocks, scales

    def _read(self, source: Source) -> dict[str, torch.Tensor]:
        # The files are mapped only for this call: pages of a mapped file count as memory in use.
        return read_source(self._model, source, MappedFiles(), torch.float32, self._convert_gguf)


def blank_model(config: Any) -> Any:
    """Return a config's float32 model in evaluation mode, with parameters on the meta device and buffers on the CPU."""
    return skeleton(config, torch.float32, buffers=True).eval()


def fill_buffers(model: nn.Module, stored: StoredWeights) -> None:
    buffers = dict(model.named_buffers())
    for name in buffers.keys() & stored.shapes.keys():
        buffers[name].copy_(stored.read(name))
