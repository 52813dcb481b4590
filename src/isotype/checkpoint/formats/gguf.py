"""Reads the headers of GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

import functools
import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from isotype.checkpoint.formats.tensor import DAMAGED, HeaderFile, TensorHeader, by_name, repeated
from isotype.core.errors import CheckpointError, Problem

_MAX_DIMENSIONS = 4  # a limit of ggml
# Default alignment in bytes: the data of each tensor begins at a multiple of the alignment.
_ALIGNMENT = 32
# Fixed-size value types of GGUF metadata, as struct formats: u8 i8 u16 i16 u32 i32 f32 bool u64 i64 f64.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_BEGIN = 24  # offset of the first entry in bytes


def read_gguf_header(path: Path) -> tuple[tuple[TensorHeader, ...], Mapping[str, object]]:
    """Return the tensor headers of a GGUF file, sorted by name, and the scalars and strings of its metadata.

    Arrays are skipped. (gguf.GGUFReader takes seconds to read the 10^5 strings of a vocabulary.) Raises CheckpointError if
    the file is missing, truncated or damaged, or has an unknown version or tensor type.
    """
    file = HeaderFile(path)
    if file.size() == 0:
        raise file.broken("an empty file", "a GGUF file")
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _parse(_Reader(data, file))
        except (struct.error, OverflowError) as error:  # OverflowError: an offset beyond any file's size
            what = f"the header is longer than the file ({len(data)} bytes)"
            raise file.broken(what, "a complete file") from error
        except UnicodeDecodeError as error:
            raise file.broken(f"a name that is not UTF-8 ({error})", "UTF-8") from error


class _Reader:
    """Reads the entries of a mapped GGUF file, and stores their values in `metadata`, except arrays."""

    def __init__(self, data: mmap.mmap, file: HeaderFile) -> None:
        self.data, self.file = data, file
        self.metadata: dict[str, object] = {}

    def entries(self, count: int) -> Iterator[tuple[str, int, int]]:
        """Yield (key, first byte, last byte + 1) of each entry."""
        at = _BEGIN
        for _ in range(count):
            begin = at
            key, at = self.string(at)
            (kind,) = struct.unpack_from("<I", self.data, at)
            if key in self.metadata:
                raise self.file.broken(f"metadata {key!r} twice", "each key once")
            at = self._value(key, kind, at + 4)
            if at > len(self.data):  # arrays are skipped unread, but transformers reads them later
                raise struct.error("an array continues after the last byte")
            yield key, begin, at

    def string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self.data, at)
        # struct refuses a huge length. With one byte more than the file has, it raises struct.error as intended.
        (text,) = struct.unpack_from(f"{min(length, len(self.data) + 1)}s", self.data, at + 8)
        return text.decode("utf-8"), at + 8 + length

    def _value(self, key: str, kind: int, at: int) -> int:
        """Read a value, and store it unless it is an array. Return the offset after the value."""
        if kind in _SCALARS:
            form = f"<{_SCALARS[kind]}"
            (self.metadata[key],) = struct.unpack_from(form, self.data, at)
            return at + struct.calcsize(form)
        if kind == _STRING:
            self.metadata[key], at = self.string(at)
            return at
        if kind == _ARRAY:
            kind, count = struct.unpack_from("<IQ", self.data, at)
            at += 12
            if kind in _SCALARS:
                size: int = count * struct.calcsize(_SCALARS[kind])
                return at + size
            if kind == _STRING:
                for _ in range(count):
                    (length,) = struct.unpack_from("<Q", self.data, at)
                    at += 8 + length
                return at
        raise self.file.broken(f"metadata {key!r} of type {kind}", "a GGUF value type")


def _parse(reader: _Reader) -> tuple[tuple[TensorHeader, ...], Mapping[str, object]]:
    data, file, metadata = reader.data, reader.file, reader.metadata
    if data[:4] != b"GGUF":
        raise file.broken(f"the first bytes {data[:4]!r}", "b'GGUF'", "give a GGUF file")
    version, tensor_count, entry_count = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        fix = "convert it again with a current llama.cpp (little-endian)"
        raise file.broken(f"GGUF version {version}", "version 2 or 3", fix)
    *_, (_, _, at) = (("", 0, _BEGIN), *reader.entries(entry_count))
    if not isinstance(architecture := metadata.get("general.architecture", ""), str):
        raise file.broken(f"general.architecture {architecture!r}", "the name of an architecture")
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        fix = "join them with llama.cpp: llama-gguf-split --merge"
        raise file.broken(f"one of {parts} parts of a split GGUF", "a whole GGUF file", fix)
    file.limit_tensors(tensor_count)
    entries = []
    for _ in range(tensor_count):
        name, at = reader.string(at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        if dimensions > _MAX_DIMENSIONS:
            raise file.broken(f"tensor {name!r} of {dimensions} dimensions", f"at most {_MAX_DIMENSIONS}")
        *sizes, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", data, at + 4)
        at += 4 + 8 * dimensions + 12
        # ggml lists the fastest dimension first, torch last.
        entries.append((name, tuple(reversed(sizes)), kind, offset))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):  # the check of ggml
        raise file.broken(f"general.alignment {alignment!r}", "a power of two")
    start = -(-at // alignment) * alignment
    return by_name(_tensors(entries, start, len(data), file)), metadata


def without_vocabulary(path: Path, tensors: Sequence[TensorHeader]) -> bytes:
    """Return a small GGUF file as bytes. It has the tensor names and the metadata of `path`, but no vocabulary."""
    entries: list[bytes] = []
    vocabulary = 0
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data, HeaderFile(path))
        for key, begin, end in reader.entries(struct.unpack_from("<Q", data, 16)[0]):
            kind, _, size = struct.unpack_from("<IIQ", data, begin + 8 + len(key.encode()))
            if kind == _ARRAY and key.startswith("tokenizer."):
                vocabulary = size if key == "tokenizer.ggml.tokens" else vocabulary
            elif key != "general.alignment":  # the alignment may be gigabytes
                entries.append(data[begin:end])
    size_key = f"{reader.metadata.get('general.architecture')}.vocab_size"
    if vocabulary and size_key not in reader.metadata:
        entries.append(_text(size_key) + struct.pack("<II", 4, vocabulary))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries)
    # Every tensor is one float32 number: only the names are needed.
    header += b"".join(_text(tensor.name) + struct.pack("<IQIQ", 1, 1, 0, 0) for tensor in tensors)
    return header + bytes(-len(header) % _ALIGNMENT + _ALIGNMENT)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _tensors(
    entries: Sequence[tuple[str, tuple[int, ...], int, int]], start: int, end: int, file: HeaderFile
) -> list[TensorHeader]:
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ModuleNotFoundError as error:
        headline, what = "GGUF files need a package that is not installed", f"no module named {error.name}"
        raise CheckpointError.of(
            headline, what, "the package gguf", "pip install 'isotype[train]'"
        ) from error
    types = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    problems = repeated((name for name, *_ in entries), "tensor ")
    tensors: list[TensorHeader] = []
    cut: list[str] = []
    for name, shape, kind, offset in entries:
        if kind not in types:
            fix = "update gguf (pip install -U gguf), or convert the model again"
            problems.append(Problem(f"tensor {name!r} of type {kind}", "a type that gguf supports", fix))
            continue
        type_name, block, block_bytes = types[kind]
        if shape and shape[-1] % block:
            what = f"tensor {name!r}: rows of {shape[-1]} elements in {type_name}"
            problems.append(Problem(what, f"rows of a multiple of {block} elements", DAMAGED))
            continue
        nbytes = math.prod(shape) // block * block_bytes
        if start + offset + nbytes > end:
            cut.append(name)
        tensors.append(TensorHeader(name, type_name, shape, nbytes, file.path, start + offset))
    if cut:
        what = f"the file is too short for {len(cut)} of its tensors, such as {cut[0]!r}"
        problems.append(Problem(what, "a complete file", DAMAGED))
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.bytes))
    for before, tensor in pairwise(tensors):
        if tensor.begin < before.begin + before.bytes:
            what = f"tensor {tensor.name!r} at byte {tensor.begin} overlaps {before.name!r}"
            problems.append(Problem(what, f"byte {before.begin + before.bytes} or later", DAMAGED))
    if problems:
        raise file.damaged(problems)
    return tensors


@functools.cache
def unpackable(kind: str) -> bool:
    """Return True if the library gguf can dequantize blocks of this llama.cpp type."""
    import numpy
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    try:
        dequantize(numpy.zeros((1, size), numpy.uint8), GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True
