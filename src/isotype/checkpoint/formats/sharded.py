"""Checkpoints in several files, listed by an index: model.safetensors.index.json or pytorch_model.bin.index.json."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isotype.checkpoint.formats.json_file import parse_unique
from isotype.checkpoint.formats.tensor import DAMAGED, TensorHeader, by_name, damaged, file_size, printable
from isotype.core.errors import CheckpointError, Problem
from isotype.core.names import listed

_READERS = 8
_HEADER = 1 << 16  # bytes that the header of a usual shard fits into
_LONGEST = 255  # bytes in the name of a file


def read_sharded_headers(
    index: Path, read: Callable[[Path], tuple[TensorHeader, ...]]
) -> tuple[tuple[TensorHeader, ...], Mapping[str, object]]:
    """The tensors of all shards that an index lists, and the index's metadata.

    Args:
        index: the JSON file.
        read: reads the headers of one shard.

    Raises:
        CheckpointError: shards are missing or damaged, or index and shards disagree; lists every problem.
    """
    weight_map, metadata = _read_index(index)
    expected: dict[str, set[str]] = defaultdict(set)
    for name, shard in weight_map.items():
        expected[shard].add(name)

    shards = sorted(expected)
    problems: list[Problem] = []
    tensors: list[TensorHeader] = []
    for shard, there in zip(shards, _fetched([index.parent / shard for shard in shards]), strict=True):
        names, file = expected[shard], index.parent / shard
        if not there:
            missing = f"{shard} is missing; {index.name} expects {_some(names)} in it"
            problems.append(Problem(missing, f"the file {file}", "download or copy it into the directory"))
            continue
        try:
            held = read(file)
        except CheckpointError as error:
            problems += [
                Problem(f"{shard}: {each.given}", each.expected, each.fix) for each in error.problems
            ]
            continue
        tensors += held
        problems += _disagreements(index, shard, names, {tensor.name for tensor in held})
    if problems:
        raise damaged(index, problems)
    return by_name(tensors), metadata


def _fetched(files: Sequence[Path]) -> Iterator[bool]:
    """Whether each file is there; a few at a time are opened ahead, so that nobody waits for a file server in turn.

    What they begin with is then in memory. It is parsed by one thread: several would wait for each other.
    """

    def fetch(file: Path) -> bool:
        if not file.is_file():
            return False
        with file.open("rb", buffering=0) as opened:
            opened.read(_HEADER)
        return True

    with ThreadPoolExecutor(_READERS) as readers:
        yield from readers.map(fetch, files)


def _some(names: set[str]) -> str:
    return f"{len(names)} tensors ({listed(sorted(names), 1)})" if len(names) > 1 else listed(names)


def _disagreements(index: Path, shard: str, expected: set[str], present: set[str]) -> list[Problem]:
    fix = "take index and shards from the same save of the model"
    return [
        Problem(f"{shard} {what} {listed(sorted(some))}", f"what {index.name} says", fix)
        for some, what in ((expected - present, "lacks"), (present - expected, "holds, against the index,"))
        if some
    ]


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
        content, twice = parse_unique(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(index, [Problem(f"not JSON ({error})", "a JSON object", DAMAGED)]) from error
    if twice:
        raise damaged(index, [Problem(f"{name!r} twice", "each name once", DAMAGED) for name in twice])
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, [Problem("no weight_map", "a weight_map: the shard of every tensor", DAMAGED)])
    good: set[object] = set()
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard in good and printable(name):
            continue
        if not _is_file_name(shard) or not printable(name):
            shard_of = f"shard {shard!r} of tensor {name!r}"
            raise damaged(index, [Problem(shard_of, "the name of a file in the same directory", DAMAGED)])
        good.add(shard)
    metadata = content.get("metadata")
    if not isinstance(metadata, dict):
        fix = 'add "metadata": {} to it: transformers does not load a checkpoint without it'
        raise damaged(index, [Problem("no metadata", "an object of that name, which may be empty", fix)])
    return weight_map, metadata


def _is_file_name(shard: object) -> bool:
    """Whether it is a plain name: an index must not reach outside of its directory.

    A link of that name is followed: indices come from elsewhere, links do not, and the hub's cache is made of them.
    """
    if not isinstance(shard, str) or not shard or not printable(shard) or "\0" in shard:
        return False
    return Path(shard).name == shard != ".." and len(shard.encode()) <= _LONGEST
