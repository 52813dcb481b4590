"""Reads names, dtypes, shapes and sizes of the tensors in a checkpoint from headers. No weight is read.

The formats are safetensors (https://github.com/huggingface/safetensors#format), `torch.save` and GGUF. Safetensors and
torch files may be shards with an index.
"""

import functools
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from isotype.checkpoint.formats.gguf import read_gguf_header
from isotype.checkpoint.formats.json_file import read_json
from isotype.checkpoint.formats.safetensors import read_safetensors
from isotype.checkpoint.formats.tensor import DAMAGED, HeaderFile, TensorHeader, by_name, printable
from isotype.checkpoint.formats.torch_file import read_torch_header
from isotype.core.dtypes import dtypes_named
from isotype.core.errors import CheckpointError, Problem
from isotype.core.names import listed

Kind = Literal["model", "adapter"]
Format = Literal["safetensors", "torch", "gguf"]

_LAYOUTS: tuple[tuple[str, Kind], ...] = (
    ("model.safetensors", "model"),
    ("model.safetensors.index.json", "model"),
    ("pytorch_model.bin", "model"),
    ("pytorch_model.bin.index.json", "model"),
    ("adapter_model.safetensors", "adapter"),
)
_INDEX_SUFFIXES: Mapping[str, Format] = {".safetensors.index.json": "safetensors", ".bin.index.json": "torch"}
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class CheckpointHeaders:
    """The headers of all files of one checkpoint.

    Attributes:
        kind: `"model"` or `"adapter"` (PEFT's adapter_model.safetensors).
        metadata: the metadata of the file. For a GGUF file, only its scalars and strings.
        quantization: the settings that `quantization_beside` returns.
    """

    path: Path
    format: Format
    kind: Kind
    tensors: tuple[TensorHeader, ...]
    metadata: Mapping[str, object]
    quantization: Mapping[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the architecture of a GGUF file; "" for other files."""
        return str(self.metadata.get("general.architecture", ""))


def read_headers(path: str | Path) -> CheckpointHeaders:
    """Read the headers of a checkpoint, which is a directory, a .safetensors, .gguf or torch file, or an index and its shards."""
    path = Path(path)
    headers = _read_headers(path, *_file_of(path))
    return headers if headers.format == "gguf" else replace(headers, quantization=quantization_beside(path))


def quantization_beside(weights: Path) -> Mapping[str, Any]:
    """Return the quantization settings in config.json or modelopt's hf_quant_config.json; an empty mapping without
    them.

    If a config has a float8 dtype but no quantization, the `quant_method` is `cast`, because the weights were cast to
    float8.
    """
    directory = weights if weights.is_dir() else weights.parent
    file = directory / "config.json"
    config = read_json(file) if file.is_file() else {}
    holders = [holder for holder in (config, config.get("text_config")) if isinstance(holder, dict)]
    for options in filter(None, (holder.get("quantization_config") for holder in holders)):
        if isinstance(options, dict):
            return options
        what = f"{file}: quantization_config is {options!r:.80}"
        expected = "an object that has a quant_method"
        raise CheckpointError.of("config.json cannot be read", what, expected, DAMAGED)
    file = directory / "hf_quant_config.json"
    options = read_json(file).get("quantization") if file.is_file() else None
    if isinstance(options, dict):
        return {"quant_method": "modelopt", **options}
    return {"quant_method": "cast"} if any("float8" in dtype for dtype in dtypes_named(config)) else {}


def _read_headers(path: Path, file: Path, kind: Kind) -> CheckpointHeaders:
    for suffix, form in _INDEX_SUFFIXES.items():
        if file.name.endswith(suffix):
            return CheckpointHeaders(path, form, kind, *read_sharded_headers(file))
    if file.suffix == ".gguf":
        return CheckpointHeaders(path, "gguf", kind, *read_gguf_header(file))
    if file.name.endswith(_TORCH_SUFFIXES):
        return CheckpointHeaders(path, "torch", kind, by_name(read_torch_header(file)), {})
    if file.suffix != ".safetensors" and file.exists():
        endings = f".safetensors, .gguf, .bin, .pt, {' or '.join(_INDEX_SUFFIXES)}"
        expected = f"a directory, or a file ending in {endings}"
        fix = "pass the directory or file that contains the weights"
        raise CheckpointError.of("not a checkpoint", f"the file {file}", expected, fix)
    tensors, metadata = read_safetensors(file)
    return CheckpointHeaders(path, "safetensors", kind, by_name(tensors), metadata)


def read_file_headers(file: Path) -> tuple[TensorHeader, ...]:
    """Return the tensors of one .safetensors or torch file. Raise CheckpointError if the file is damaged."""
    return read_torch_header(file) if file.name.endswith(_TORCH_SUFFIXES) else read_safetensors(file)[0]


def headers_of_files(source: str, files: Sequence[str]) -> CheckpointHeaders:
    """Return the headers of a model's .safetensors or torch files. Error messages call the model `source`."""
    tensors = tuple(tensor for file in files for tensor in read_file_headers(Path(file)))
    form: Format = "torch" if str(files[0]).endswith(".bin") else "safetensors"
    return CheckpointHeaders(Path(source), form, "model", tensors, {}, quantization_beside(Path(files[0])))


def _file_of(path: Path) -> tuple[Path, Kind]:
    """Return (weights file or index of shards, kind of the weights) for a directory or a file."""
    if not path.is_dir():
        if path.name == "adapter_model.bin" and path.is_file():
            raise _refuse_pickle([path])
        return path, "adapter" if path.name == "adapter_model.safetensors" else "model"
    weights = find_weights(path)
    if weights is not None:
        return weights
    what = f"the directory {path} holds {contents(path)}"
    expected = f"one of {', '.join(name for name, _ in _LAYOUTS)} or a .gguf file"
    raise CheckpointError.of(
        "not a checkpoint", what, expected, "pass the directory that contains the weights"
    )


def find_weights(directory: Path) -> tuple[Path, Kind] | None:
    """Return (weights file or index of shards, kind of the weights) for a directory; None if the directory has no weights."""
    for name, kind in _LAYOUTS:
        if (directory / name).is_file():
            return directory / name, kind
    ggufs = sorted(directory.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0], "model"
    if ggufs:
        what = f"the directory {directory} holds {_listed(ggufs)}"
        raise CheckpointError.of("more than one GGUF file", what, "one GGUF file", f"give one: {ggufs[0]}")
    stray = sorted(directory.glob("*.safetensors"))
    if stray:
        headline = "it is unknown which safetensors files belong to the model"
        expected = "model.safetensors, or shards listed in model.safetensors.index.json"
        fix = "copy the index together with the shards, or rename a single file to model.safetensors"
        raise CheckpointError.of(headline, f"the directory {directory} holds {_listed(stray)}", expected, fix)
    files = (file for file in directory.iterdir() if file.name.endswith(_TORCH_SUFFIXES))
    begins = ("pytorch_model", "adapter_model", "model")
    pickles = sorted(file for file in files if file.name.startswith(begins))
    if pickles:
        raise _refuse_pickle(pickles)
    return None


def contents(directory: Path) -> str:
    return _listed(sorted(directory.iterdir())) or "nothing"


def _listed(files: Sequence[Path]) -> str:
    return listed((file.name for file in files), 6)


def _refuse_pickle(files: Sequence[Path]) -> CheckpointError:
    path, what = files[0], f"{_listed(files)} in {files[0].parent}"
    if path.name != "adapter_model.bin":
        return CheckpointError.of(
            "it is unknown which files belong to the model",
            what,
            "model.safetensors or pytorch_model.bin, in one file or as shards with an index",
            "copy the index together with the shards, or pass the path of a single file",
        )
    # The command reads only tensors: with weights_only, torch runs no code.
    fix = (
        f'cd {shlex.quote(str(path.parent))} && python -c "import torch; from safetensors.torch import save_file; '
        "save_file({k: v.contiguous() for k, v in torch.load('adapter_model.bin', weights_only=True).items()}, "
        "'adapter_model.safetensors')\""
    )
    expected = "safetensors, because reading a pickle runs the code that its author put into it"
    return CheckpointError.of("the weights are pickled", what, expected, fix)


_READERS = 8
_HEADER = 1 << 16  # bytes: most headers are smaller
_LONGEST = 255  # bytes of a file name


def read_sharded_headers(index: Path) -> tuple[tuple[TensorHeader, ...], Mapping[str, object]]:
    """Return the tensors of all shards and the metadata of the index. Raise one CheckpointError with all problems."""
    weight_map, metadata = _read_index(index)
    expected: dict[str, set[str]] = defaultdict(set)
    for name, shard in weight_map.items():
        expected[shard].add(name)

    shards = sorted(expected)
    problems: list[Problem] = []
    tensors: list[TensorHeader] = []
    for shard, exists in zip(shards, _fetched([index.parent / shard for shard in shards]), strict=True):
        names, file = expected[shard], index.parent / shard
        if not exists:
            wanted = f"{len(names)} tensors ({listed(sorted(names), 1)})" if len(names) > 1 else listed(names)
            missing = f"{shard} is missing; {index.name} expects {wanted} in it"
            problems.append(
                Problem(missing, f"the file {file}", "download the shard, or copy it into the directory")
            )
            continue
        try:
            in_shard = read_file_headers(file)
        except CheckpointError as error:
            problems += [replace(problem, given=f"{shard}: {problem.given}") for problem in error.problems]
            continue
        tensors += in_shard
        present = {header.name for header in in_shard}
        fix = "take the index and the shards from the same save of the model"
        for some, what in ((names - present, "lacks"), (present - names, "also has")):
            if some:
                difference = f"{shard} {what} {listed(sorted(some))}"
                problems.append(Problem(difference, f"the tensors that {index.name} lists for {shard}", fix))
    if problems:
        raise HeaderFile(index).damaged(problems)
    return by_name(tensors), metadata


def _fetched(files: Sequence[Path]) -> Iterator[bool]:
    """Yield True or False for each file: whether the file exists. Threads read the headers ahead, because network storage is slow."""

    def fetch(file: Path) -> bool:
        if not file.is_file():
            return False
        with file.open("rb", buffering=0) as opened:
            opened.read(_HEADER)
        return True

    with ThreadPoolExecutor(_READERS) as readers:
        yield from readers.map(fetch, files)


def missing_shards(index: Path) -> list[str]:
    """Return the shards of an index that its directory lacks. Raise CheckpointError if the index is damaged."""
    shards = set(_read_index(index)[0].values())
    return sorted(shard for shard in shards if not (index.parent / shard).is_file())


def _read_index(index: Path) -> tuple[dict[str, str], Mapping[str, object]]:
    file = HeaderFile(index)
    file.size()
    content = file.parsed(index.read_bytes())
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise file.broken("no weight_map", "a weight_map that maps every tensor to a shard")
    file.limit_tensors(len(weight_map))
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_file_name(shard) or not printable(name):
            shard_of = f"shard {shard!r} of tensor {name!r}"
            raise file.broken(shard_of, "the name of a file in the same directory")
    metadata = content.get("metadata")
    if not isinstance(metadata, dict):
        fix = 'add "metadata": {} to the index, because transformers loads no checkpoint without this entry'
        raise file.broken("no metadata", "an object named metadata, which may be empty", fix)
    return weight_map, metadata


@functools.lru_cache(maxsize=64)
def _is_file_name(shard: str) -> bool:
    """Return True for a file name without folders, because an index must not name files outside of its directory."""
    plain = printable(shard) and "\0" not in shard and Path(shard).name == shard != ".."
    return bool(shard) and plain and len(shard.encode()) <= _LONGEST
