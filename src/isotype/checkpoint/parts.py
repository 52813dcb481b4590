"""Read some rows of a model's tensor (experts of a stack) from only the parts of a checkpoint that they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.stored import dense_shape
from isotype.checkpoint.mapping.weight_map import CONVERSION_ERRORS, TURNED, Source, converted
from isotype.checkpoint.values import Turn, dense
from isotype.core.names import grouped


class Tensors(Protocol):
    """Reader of the tensors of files."""

    def tensor(self, header: TensorHeader) -> torch.Tensor:
        """Return a tensor as stored."""


def read_source(
    model: Any, source: Source, files: Tensors, dtype: torch.dtype, turn: Turn | None
) -> dict[str, torch.Tensor]:
    """Return the dense tensors of a model that a source makes.

    Args:
        model: has the names and shapes; may be on the meta device.
        source: of its `weight_map`.
        dtype: of dequantized values; plainly stored values keep their dtype.
        turn: converts tensors of a GGUF file.
    """
    values = {tensor.name: dense(tensor, files.tensor, dtype) for tensor, _ in source.tensors}
    if source.conversion is not TURNED:
        return converted(model, source, values)
    assert turn is not None
    return turn(source, values)


def read_parts(
    model: Any, source: Source, files: Tensors, dtype: torch.dtype, turn: Turn | None, shape: torch.Size
) -> Iterator[tuple[torch.Tensor, Source]]:
    """Yield the tensor `source.target` of this shape in parts, row by row if possible, each with its source.

    The arguments are those of `read_source`.
    """
    for row in range(shape[0]):
        part = rows_of(model, source, files, source.target, shape, row, row + 1)
        value = None if part is None else read_source(model, *part, dtype, turn).get(source.target)
        if part is None or value is None or value.shape != (1, *shape[1:]):
            yield read_source(model, source, files, dtype, turn)[source.target], source
            return
        yield value, part[0]


def rows_of(
    model: Any, source: Source, files: Tensors, name: str, shape: torch.Size, start: int, stop: int
) -> tuple[Source, Tensors] | None:
    """Return the part of a source that makes rows `start` to `stop` of the tensor `name`, and its reader.

    A row comes from one of the source's tensors (per pattern), or from one row of each; None if it comes from more.
    """
    rows = torch.Size((stop - start, *shape[1:]))
    by_pattern = grouped(source.tensors, lambda each: each[1]).values()
    if source.conversion not in (None, TURNED) and all(len(each) == shape[0] for each in by_pattern):
        part = replace(source, tensors=tuple(each for tensors in by_pattern for each in tensors[start:stop]))
        if _makes(model, part, name, rows):
            return part, files
    # Rows of a matrix may be permuted; experts are not.
    if len(shape) != 3 and source.conversion is not None:
        return None
    sliced = _sliced(source, files, shape[0], start, stop)
    return sliced if sliced is not None and _makes(model, sliced[0], name, rows) else None


def _makes(model: Any, source: Source, name: str, shape: torch.Size) -> bool:
    if source.conversion is TURNED:  # known once it is made
        return True
    blank = {
        tensor.name: torch.empty(dense_shape(tensor) or (), dtype=torch.bfloat16, device="meta")
        for tensor, _ in source.tensors
    }
    try:
        return converted(model, source, blank)[name].shape == shape
    except CONVERSION_ERRORS:
        return False


@dataclass(frozen=True)
class _Rows:
    """Rows of each tensor of files, under headers of these rows."""

    files: Tensors
    whole: Mapping[TensorHeader, TensorHeader]
    start: int
    stop: int

    def tensor(self, header: TensorHeader) -> torch.Tensor:
        whole = self.whole[header]
        values = self.files.tensor(whole)
        if whole.dtype is None:  # blocks of a GGUF file, in bytes
            return values.view(whole.shape[0], -1)[self.start : self.stop].view(-1)
        return values[self.start : self.stop]


def _sliced(
    source: Source, files: Tensors, rows: int, start: int, stop: int
) -> tuple[Source, Tensors] | None:
    """Return the source, cut to these rows of each tensor; None if one has another number of rows."""
    whole: dict[TensorHeader, TensorHeader] = {}

    def some(header: TensorHeader) -> TensorHeader:
        size = header.bytes // rows
        begin = header.begin and header.begin + start * size
        shape = (stop - start, *header.shape[1:])
        part = replace(header, shape=shape, bytes=size * (stop - start), begin=begin)
        whole[part] = header
        return part

    tensors = []
    for tensor, pattern in source.tensors:
        alike = all(part.shape[:1] == (rows,) and part.bytes % rows == 0 for part in tensor.parts)
        if not alike or tensor.problem is not None or (tensor.constants and tensor.scheme is None):
            return None
        scheme = tensor.scheme
        if scheme is not None:
            scheme = replace(
                scheme,
                shape=(stop - start, *scheme.shape[1:]),
                scale=some(scheme.scale),
                zero=scheme.zero and some(scheme.zero),
                second=scheme.second and some(scheme.second),
            )
        constants = tuple(map(some, tensor.constants))
        part = replace(tensor, weight=some(tensor.weight), constants=constants, scheme=scheme)
        tensors.append((part, pattern))
    return replace(source, tensors=tuple(tensors)), _Rows(files, whole, start, stop)
