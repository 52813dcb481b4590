"""Headers of safetensors files (https://github.com/huggingface/safetensors#format), single and sharded by an index.

Read here and not by the library: it stops at the first problem and names neither tensor nor bytes.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from isotype.checkpoint.formats.tensor import DAMAGED, TensorHeader, by_name, damaged, file_size
from isotype.core.dtypes import from_safetensors_name
from isotype.core.errors import CheckpointError, Problem
from isotype.core.names import listed

_MAX_HEADER = 100_000_000  # the limit of the safetensors library itself
_SIGNATURES = (
    (b"version https://git-lfs", "it is a Git LFS pointer: run git lfs pull"),
    (b"GGUF", "it is a GGUF file: name it .gguf"),
    (b"PK\x03\x04", "it is a PyTorch pickle file: convert it to safetensors"),
    (b"<", "it is an HTML or XML page, not the file itself: download it again"),
)


def read_safetensors_header(path: Path) -> tuple[TensorHeader, ...]:
    """The tensors of one safetensors file, in the order of their data. Reads the header only.

    Raises:
        CheckpointError: the file is missing, truncated or damaged; lists every problem.
    """
    return read_safetensors(path)[0]


def read_safetensors(path: Path) -> tuple[tuple[TensorHeader, ...], Mapping[str, object]]:
    header, data_bytes = _safetensors_json(path)
    problems: list[Problem] = []
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append(Problem(f"__metadata__ {metadata!r}", "an object of text", DAMAGED))
    spans: list[tuple[int, int, TensorHeader]] = []
    for name, entry in header.items():
        found = _safetensors_entry(name, entry, path)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            spans.append(found)
    spans.sort(key=lambda span: span[:2])
    problems = problems or _check_spans(spans, data_bytes)
    if problems:
        raise damaged(path, problems)
    start = path.stat().st_size - data_bytes
    return tuple(replace(tensor, begin=start + begin) for begin, _, tensor in spans), metadata


def _safetensors_json(path: Path) -> tuple[dict[str, Any], int]:
    """The header as JSON and the number of bytes that follow it."""
    size = file_size(path)
    with path.open("rb") as file:
        start = file.read(32)
        if size < 8:
            raise damaged(
                path, [Problem(f"{size} bytes", "at least the 8 bytes of the header's length", DAMAGED)]
            )
        (length,) = struct.unpack("<Q", start[:8])
        if length > _MAX_HEADER or length < 2:
            kinds = [text for signature, text in _SIGNATURES if start.startswith(signature)]
            fix = kinds[0] if kinds else "it is not a safetensors file, or damaged: download or save it again"
            raise damaged(path, [Problem(f"a header of {length} bytes", f"2 to {_MAX_HEADER}", fix)])
        if 8 + length > size:
            given = f"the header ends at byte {8 + length}, the file at byte {size}"
            raise damaged(path, [Problem(given, "a complete file", DAMAGED)])
        file.seek(8)
        text = file.read(length)
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged(
            path, [Problem(f"a header that is not JSON ({error})", "a JSON object", DAMAGED)]
        ) from error
    if not isinstance(header, dict):
        raise damaged(
            path, [Problem(f"a header that is a JSON {type(header).__name__}", "a JSON object", DAMAGED)]
        )
    if twice:
        raise damaged(path, [Problem(f"tensor {name!r} twice", "each name once", DAMAGED) for name in twice])
    return header, size - 8 - length


def _safetensors_entry(name: str, entry: object, path: Path) -> tuple[int, int, TensorHeader] | Problem:
    if not isinstance(entry, dict):
        return Problem(f"tensor {name!r}: {entry!r}", "an object with dtype, shape and data_offsets", DAMAGED)
    dtype_name, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    bits = _bits(dtype_name)
    if not isinstance(dtype_name, str) or bits is None:
        return Problem(f"tensor {name!r}: dtype {dtype_name!r}", "a dtype such as 'BF16'", DAMAGED)
    if not _sizes(shape):
        return Problem(f"tensor {name!r}: shape {shape!r}", "a list of sizes", DAMAGED)
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return Problem(f"tensor {name!r}: data_offsets {offsets!r}", "[begin, end]", DAMAGED)
    begin, end = offsets
    needed = math.prod(shape) * bits
    if needed != 8 * (end - begin):
        given = f"tensor {name!r}: {end - begin} bytes for {dtype_name} {shape}"
        return Problem(given, f"{needed // 8} bytes", DAMAGED)
    dtype = from_safetensors_name(dtype_name)
    return begin, end, TensorHeader(name, dtype_name, dtype, tuple(shape), end - begin, path)


def _bits(dtype_name: object) -> int | None:
    """Bits of one element, which every safetensors dtype has in its name: F32, BF16, F8_E4M3, F4, C64."""
    if dtype_name == "BOOL":
        return 8
    found = re.match(r"(?:BF|F|I|U|C)(\d{1,3})(?:_|$)", dtype_name) if isinstance(dtype_name, str) else None
    return int(found[1]) if found else None


def _sizes(value: object) -> TypeGuard[list[int]]:
    # type() rather than isinstance: JSON's true is an int to Python.
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_spans(spans: Sequence[tuple[int, int, TensorHeader]], data_bytes: int) -> list[Problem]:
    """Tensors lie end to end from the first byte of data to the last: the format leaves no holes."""
    last = max((end for _, end, _ in spans), default=0)
    if last > data_bytes:
        cut = [tensor.name for _, end, tensor in spans if end > data_bytes]
        given = f"{data_bytes} bytes of data; {len(cut)} tensors end beyond them, first {cut[0]!r}"
        return [Problem(given, f"{last} bytes", DAMAGED)]
    problems = []
    previous, before = 0, "the header"
    for begin, end, tensor in spans:
        if begin != previous:
            what = "overlaps" if begin < previous else "leaves a hole after"
            given = f"tensor {tensor.name!r} at byte {begin} {what} {before}"
            problems.append(Problem(given, f"byte {previous}", DAMAGED))
        previous, before = max(previous, end), repr(tensor.name)
    if last < data_bytes:
        problems.append(Problem(f"{data_bytes - last} bytes after the last tensor", "none", DAMAGED))
    return problems


def read_sharded_headers(index: Path) -> tuple[tuple[TensorHeader, ...], Mapping[str, object]]:
    """The tensors of all shards that a model.safetensors.index.json lists, and the index's metadata.

    Raises:
        CheckpointError: shards are missing or damaged, or index and shards disagree; lists every problem.
    """
    weight_map, metadata = _read_index(index)
    expected: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        expected.setdefault(shard, set()).add(name)
    problems: list[Problem] = []
    tensors: list[TensorHeader] = []
    for shard, names in sorted(expected.items()):
        file = index.parent / shard
        if not file.is_file():
            given = f"{shard} is missing; {index.name} expects {len(names)} tensors in it"
            problems.append(Problem(given, f"the file {file}", "download or copy it into the directory"))
            continue
        try:
            held = read_safetensors_header(file)
        except CheckpointError as error:
            problems += [
                Problem(f"{shard}: {each.given}", each.expected, each.fix) for each in error.problems
            ]
            continue
        tensors += held
        found = {tensor.name for tensor in held}
        for some, what in ((names - found, "lacks"), (found - names, "holds, against the index,")):
            if some:
                given = f"{shard} {what} {listed(sorted(some))}"
                fix = "take index and shards from the same save of the model"
                problems.append(Problem(given, f"what {index.name} says", fix))
    if problems:
        raise damaged(index, problems)
    return by_name(tensors), metadata


def missing_shards(index: Path) -> list[str]:
    """The shards that an index lists and its directory lacks.

    Raises:
        CheckpointError: the index itself is damaged.
    """
    return sorted(
        shard for shard in set(_read_index(index)[0].values()) if not (index.parent / shard).is_file()
    )


def _read_index(index: Path) -> tuple[dict[str, str], Mapping[str, object]]:
    file_size(index)
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(index, [Problem(f"not JSON ({error})", "a JSON object", DAMAGED)]) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, [Problem("no weight_map", "a weight_map: the shard of every tensor", DAMAGED)])
    # A shard is a plain name: an index must not reach outside of its directory.
    bad = [
        shard
        for shard in weight_map.values()
        if not isinstance(shard, str) or not shard or Path(shard).name != shard
    ]
    if bad:
        raise damaged(
            index, [Problem(f"shard {bad[0]!r}", "the name of a file in the same directory", DAMAGED)]
        )
    metadata = content.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}
