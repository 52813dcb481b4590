"""Reads the header of one safetensors file (https://github.com/huggingface/safetensors#format).

The library safetensors is not used, because it stops at the first problem, and its errors name neither tensor nor
bytes.
"""

import functools
import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from isotype.checkpoint.formats.tensor import DAMAGED, MAX_TENSORS, HeaderFile, TensorHeader, printable
from isotype.core.errors import Problem

_MAX_HEADER = 160 * MAX_TENSORS  # bytes; a header of 100 MB, the library's limit, can take 13 s to parse
_SIGNATURES = (
    (b"version https://git-lfs", "it is a Git LFS pointer: run git lfs pull"),
    (
        b"\x80",
        "it is a Python pickle, which may run code when it is read: use the checkpoint in safetensors",
    ),
    (b"GGUF", "it is a GGUF file: rename it to a name that ends in .gguf"),
    (b"PK\x03\x04", "it is a PyTorch file: rename it to a name that ends in .bin"),
    (b"<", "it is an HTML or XML page, not the file itself: download it again"),
)


def read_safetensors(path: Path) -> tuple[tuple[TensorHeader, ...], Mapping[str, object]]:
    """Return the tensors that a safetensors file describes, in the order of their data, and the file's metadata."""
    file = HeaderFile(path)
    header, data_bytes = _header_and_data_size(file)
    file.limit_tensors(len(header))
    metadata = header.pop("__metadata__", {})
    start = path.stat().st_size - data_bytes
    parsed = [_tensor_or_problem(name, entry, path, start) for name, entry in header.items()]
    problems = [entry for entry in parsed if isinstance(entry, Problem)]
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.insert(0, Problem(f"__metadata__ {metadata!r:.80}", "an object of text", DAMAGED))
    tensors = [entry for entry in parsed if isinstance(entry, TensorHeader)]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.bytes))
    problems = problems or _check_spans(tensors, start, data_bytes)
    if problems:
        raise file.damaged(problems)
    return tuple(tensors), metadata


def _header_and_data_size(file: HeaderFile) -> tuple[dict[str, Any], int]:
    size = file.size()
    with file.path.open("rb") as content:
        start = content.read(32)
        if size < 8:
            raise file.broken(f"{size} bytes", "at least the 8 bytes of the header's length")
        (length,) = struct.unpack("<Q", start[:8])
        if length > _MAX_HEADER or length < 2:
            kinds = [text for signature, text in _SIGNATURES if start.startswith(signature)]
            fix = kinds[0] if kinds else "it is not a safetensors file, or damaged: download or save it again"
            expected = f"2 to {_MAX_HEADER} bytes, enough for {MAX_TENSORS:,} tensors"
            raise file.broken(f"a header of {length} bytes", expected, fix)
        if 8 + length > size:
            what = f"the header ends at byte {8 + length}, the file at byte {size}"
            raise file.broken(what, "a complete file")
        content.seek(8)
        text = content.read(length)
    header = file.parsed(text, "a header that is ", "tensor ")
    if not isinstance(header, dict):
        raise file.broken(f"a header that is a JSON {type(header).__name__}", "a JSON object")
    return header, size - 8 - length


def _tensor_or_problem(name: str, entry: object, path: Path, start: int) -> TensorHeader | Problem:
    if not isinstance(entry, dict):
        expected = "an object with dtype, shape and data_offsets"
        return Problem(f"tensor {name!r}: {entry!r:.80}", expected, DAMAGED)
    dtype_name, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    bits = _bits(dtype_name) if isinstance(dtype_name, str) else None
    if not printable(name):
        return Problem(f"tensor {name!r}", "a name in UTF-8", DAMAGED)
    if bits is None or not isinstance(dtype_name, str):
        return Problem(f"tensor {name!r}: dtype {dtype_name!r:.80}", "a dtype such as 'BF16'", DAMAGED)
    if not _sizes(shape):
        return Problem(f"tensor {name!r}: shape {shape!r:.80}", "a list of sizes", DAMAGED)
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return Problem(f"tensor {name!r}: data_offsets {offsets!r:.80}", "[begin, end]", DAMAGED)
    begin, end = offsets
    needed = math.prod(shape) * bits
    if needed != 8 * (end - begin):
        tensor = f"tensor {name!r}: {end - begin} bytes for {dtype_name} {shape}"
        return Problem(tensor, f"{needed // 8} bytes", DAMAGED)
    return TensorHeader(name, dtype_name, tuple(shape), end - begin, path, start + begin)


@functools.lru_cache(maxsize=64)
def _bits(dtype_name: str) -> int | None:
    """Return the number of bits of an element. All dtype names of safetensors except BOOL contain this number (F8_E4M3)."""
    if dtype_name == "BOOL":
        return 8
    match = re.match(r"(?:BF|F|I|U|C)(\d{1,3})(?:_|$)", dtype_name)
    return int(match[1]) if match else None


def _sizes(value: object) -> TypeGuard[list[int]]:
    # type() instead of isinstance: JSON's `true` becomes a bool, which is an int.
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _check_spans(tensors: Sequence[TensorHeader], start: int, data_bytes: int) -> list[Problem]:
    """Return a problem for each gap or overlap between tensors, because the format allows neither."""
    last = max((tensor.begin + tensor.bytes for tensor in tensors), default=start) - start
    if last > data_bytes:
        cut = [tensor.name for tensor in tensors if tensor.begin + tensor.bytes > start + data_bytes]
        place = f"{data_bytes} bytes of data, too few for {len(cut)} of the tensors, such as {cut[0]!r}"
        return [Problem(place, f"{last} bytes", DAMAGED)]
    problems = []
    previous, before = start, "the header"
    for tensor in tensors:
        if tensor.begin != previous:
            what = "overlaps" if tensor.begin < previous else "leaves a hole after"
            place = f"tensor {tensor.name!r} at byte {tensor.begin - start} {what} {before}"
            problems.append(Problem(place, f"byte {previous - start}", DAMAGED))
        previous, before = max(previous, tensor.begin + tensor.bytes), repr(tensor.name)
    if last < data_bytes:
        problems.append(Problem(f"{data_bytes - last} bytes after the last tensor", "none", DAMAGED))
    return problems
