"""Reads the weights of a checkpoint one at a time, by their names in the model."""

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.formats.mapped import MappedFiles, Tensors
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.stored import StoredTensor, main_form
from isotype.checkpoint.mapping.weight_map import FROM_GGUF, Source, WeightMap, converted, shaped, weight_map
from isotype.checkpoint.values import dense, gguf_conversion
from isotype.checkpoint.weightless import skeleton
from isotype.core.errors import CheckpointError
from isotype.core.formats import MXFP4
from isotype.core.names import grouped


class StoredWeights:
    """Reads a checkpoint's tensors by their names in `model`.

    When a tensor is read, transformers' conversions (`transformers.core_model_loading`) rename, split, stack or
    transpose it. Quantized tensors are dequantized.

    Args:
        weights: result of `weight_map(model, headers)`, if it is known.

    Attributes:
        sources: name of a tensor of the model -> the stored tensors from which it is made.
        bytes_read: number of bytes that `read_rows` has read from the files so far.
    """

    def __init__(self, model: Any, headers: CheckpointHeaders, weights: WeightMap | None = None) -> None:
        self.model, self.path = model, headers.path
        self.bytes_read = 0
        self.sources = (weights or weight_map(model, headers)).sources
        self._convert_gguf = gguf_conversion(model, headers)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Name -> shape, for each tensor of the model that the checkpoint has. Read this attribute before the model is quantized."""
        state = self.model.state_dict(keep_vars=True)
        # The headers of a GGUF file do not determine the shapes after its conversion, so these are taken from the model.
        shapes = {
            name: state[name].shape if source.conversion is FROM_GGUF else source.shapes.get(name)
            for name, source in self.sources.items()
        }
        return {name: torch.Size(shape) for name, shape in shapes.items() if shape is not None}

    def in_other_dtypes(self, quantized: Collection[str]) -> dict[str, torch.dtype]:
        """Return name -> dtype for float tensors outside of `quantized` that have another dtype than most tensors."""
        if self._convert_gguf is not None:
            return {}  # the dtypes in a GGUF file are not those of the training
        tensors = {name: source.tensors for name, source in self.sources.items() if name not in quantized}
        plain = {n: parts[0][0] for n, parts in tensors.items() if all(part.plain for part, _ in parts)}
        main = main_form(plain.values())
        others = {name: tensor.weight.dtype for name, tensor in plain.items() if tensor.form != main}
        return {name: dtype for name, dtype in others.items() if dtype is not None and dtype.itemsize > 1}

    def stored(self, name: str) -> StoredTensor:
        """Return the first of the stored tensors from which the model's tensor `name` is made."""
        return self.sources[name].tensors[0][0]

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor `name` of the model: memory-mapped in its stored dtype, or in float32 if it was quantized."""
        # The files are mapped only for this call: pages of a mapped file count as memory in use.
        return self.read_source(self.sources[name], MappedFiles(), torch.float32)[name]

    def read_rows(self, name: str, start: int, stop: int, dim: int = 0) -> torch.Tensor:
        """Return rows `start` to `stop` of `read(name)`, or columns if `dim` is 1.

        The whole tensor is read if its rows cannot be made from a part of the files (see `_part`).
        """
        source = self.sources[name]
        where = (slice(None),) * dim + (slice(start, stop),)
        if start == stop:
            sides = list(self.shapes[name])
            sides[dim] = 0
            return torch.empty(sides)
        if source.conversion is None and not source.tensors[0][0].quantized:
            # Only the pages of the rows are read from the disk.
            plain = MappedFiles().tensor(source.tensors[0][0].weight)[where].clone()
            self.bytes_read += plain.nbytes
            return plain
        shape, files = self.shapes[name], MappedFiles()
        if dim or not shape:
            rows, part = self.read_source(source, files, torch.float32)[name], source
        else:
            rows, part = self.read_part(source, name, shape, range(start, stop), files, torch.float32)
        self.bytes_read += sum(header.bytes for header in part.headers)
        return rows[where].clone() if part is source else rows

    def read_packed(self, name: str, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mxfp4 codes and scales of experts `start` to `stop`. Raise CheckpointError for other formats."""
        tensor = self.stored(name)
        if tensor.form != MXFP4 or tensor.problem is not None:
            fix = "load the model with quantization nf4 or int8, or without quantization"
            what = f"{name}, stored in {tensor.form}"
            raise CheckpointError.of("experts that are not in mxfp4", what, "blocks of mxfp4", fix)
        files = MappedFiles()
        blocks, scales = (files.tensor(part)[start:stop].clone() for part in tensor.parts)
        self.bytes_read += blocks.nbytes + scales.nbytes
        return blocks, scales

    def read_source(self, source: Source, files: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Read the tensors of a source, convert them, and return the resulting dense tensors of the model by name.

        `dtype` is the dtype of the values of quantized tensors. Other tensors keep their stored dtype.
        """
        values = {tensor.name: dense(tensor, files.tensor, dtype) for tensor, _ in source.tensors}
        if source.conversion is not FROM_GGUF:
            return converted(self.model, source, values)
        assert self._convert_gguf is not None
        return self._convert_gguf(source, values)

    def read_part(
        self, source: Source, name: str, shape: torch.Size, rows: range, files: Tensors, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Source]:
        """Return some rows of the tensor `name` of this shape, and the part of the source from which they were made.

        If these rows cannot be made from a part of the source, return the whole tensor and the source.
        """
        part = self._part(source, name, shape, rows)
        if part is not None:
            values = self.read_source(part, files, dtype).get(name)
            if values is not None and values.shape == part.shapes[name]:
                return values, part
        return self.read_source(source, files, dtype)[name], source

    def _part(self, source: Source, name: str, shape: torch.Size, rows: range) -> Source | None:
        """Return the part of a source from which some rows of the tensor `name` can be made.

        If each row is an expert with separate tensors, the part has the tensors of these rows. Otherwise, the part has
        these rows of every source tensor. Return None if the rows can be made from neither part.
        """
        named = replace(source, shapes={name: (len(rows), *shape[1:])})
        by_pattern = grouped(source.tensors, lambda pair: pair[1]).values()
        if source.conversion not in (None, FROM_GGUF) and all(len(some) == shape[0] for some in by_pattern):
            tensors = tuple(tensor for some in by_pattern for tensor in some[rows.start : rows.stop])
            part = replace(named, tensors=tensors)
            if self._makes(part, name):
                return part
        # A conversion may permute the rows of a matrix, but not experts.
        if len(shape) != 3 and source.conversion is not None:
            return None
        sliced = _sliced(named, shape[0], rows)
        return sliced if sliced is not None and self._makes(sliced, name) else None

    def _makes(self, source: Source, name: str) -> bool:
        if source.conversion is FROM_GGUF:  # the shape is checked after the conversion
            return True
        result = shaped(self.model, source)
        return not result.failure and result.shapes.get(name) == source.shapes[name]


def _sliced(source: Source, height: int, rows: range) -> Source | None:
    """Return a source with only some of the `height` rows of each tensor; None if a tensor cannot be divided into rows."""

    def cut(header: TensorHeader) -> TensorHeader:
        size = header.bytes // height
        shape, begin = (len(rows), *header.shape[1:]), header.begin + rows.start * size
        return replace(header, shape=shape, bytes=size * len(rows), begin=begin)

    tensors = []
    for tensor, pattern in source.tensors:
        scheme = tensor.scheme
        alike = all(p.begin and p.shape[:1] == (height,) and p.bytes % height == 0 for p in tensor.parts)
        if not alike or tensor.problem is not None or (tensor.constants and scheme is None):
            return None
        if scheme is not None:
            if scheme.transposed:  # rows of the weight are columns in the file
                return None
            scheme = replace(
                scheme,
                shape=(len(rows), *scheme.shape[1:]),
                scale=cut(scheme.scale),
                zero=scheme.zero and cut(scheme.zero),
                second=scheme.second and cut(scheme.second),
            )
        constants = tuple(map(cut, tensor.constants))
        part = replace(tensor, weight=cut(tensor.weight), constants=constants, scheme=scheme)
        tensors.append((part, pattern))
    return replace(source, tensors=tuple(tensors))


def blank_model(config: Any) -> Any:
    """Return the float32 model of a config in evaluation mode, with parameters on the meta device and buffers on the CPU."""
    return skeleton(config, torch.float32, buffers=True).eval()


def fill_buffers(model: nn.Module, stored: StoredWeights) -> None:
    buffers = dict(model.named_buffers())
    for name in buffers.keys() & stored.shapes.keys():
        buffers[name].copy_(stored.read(name))
