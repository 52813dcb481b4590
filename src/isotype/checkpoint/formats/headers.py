"""What a checkpoint holds (names, dtypes, shapes, sizes), read from its headers without touching a weight.

Formats: safetensors (https://github.com/huggingface/safetensors#format) and what torch.save wrote, in one file or sharded
by an index, and GGUF. Of torch's files tensors are read and nothing else is unpickled.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isotype.checkpoint.formats.gguf import read_gguf_header
from isotype.checkpoint.formats.safetensors import read_safetensors, read_safetensors_header
from isotype.checkpoint.formats.sharded import read_sharded_headers
from isotype.checkpoint.formats.tensor import TensorHeader, by_name
from isotype.checkpoint.formats.torch_file import read_torch_header
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
_INDEX_SUFFIXES = {".safetensors.index.json": "safetensors", ".bin.index.json": "torch"}
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class CheckpointHeaders:
    """All headers of one checkpoint.

    Attributes:
        path: the directory or file that was read.
        format: `"safetensors"`, `"torch"` or `"gguf"`.
        kind: `"model"` or `"adapter"` (PEFT's adapter_model.safetensors).
        tensors: every tensor, sorted by name.
        metadata: the file's own metadata; of GGUF the scalars and strings, not the arrays.
    """

    path: Path
    format: Format
    kind: Kind
    tensors: tuple[TensorHeader, ...]
    metadata: Mapping[str, object]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of a GGUF file's model, or ""."""
        return str(self.metadata.get("general.architecture", ""))


def read_headers(path: str | Path) -> CheckpointHeaders:
    """The headers of a checkpoint directory, of a .safetensors, .gguf or torch file, or of all files that an index lists.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, incomplete or pickled; lists every problem.
    """
    path = Path(path)
    file, kind = _file_of(path)
    for suffix, form in _INDEX_SUFFIXES.items():
        if file.name.endswith(suffix):
            tensors, metadata = read_sharded_headers(file, read_file_headers)
            return CheckpointHeaders(
                path, "safetensors" if form == "safetensors" else "torch", kind, tensors, metadata
            )
    if file.suffix == ".gguf":
        tensors, metadata = read_gguf_header(file)
        return CheckpointHeaders(path, "gguf", kind, tensors, metadata)
    if file.name.endswith(_TORCH_SUFFIXES):
        return CheckpointHeaders(path, "torch", kind, by_name(read_torch_header(file)), {})
    if file.suffix != ".safetensors" and file.exists():
        raise CheckpointError.of(
            "not a checkpoint",
            f"the file {file}",
            f"a directory, or a file ending in .safetensors, .gguf, .bin, .pt, {' or '.join(_INDEX_SUFFIXES)}",
            "give the directory or file that holds the weights",
        )
    tensors, metadata = read_safetensors(file)
    return CheckpointHeaders(path, "safetensors", kind, by_name(tensors), metadata)


def read_file_headers(file: Path) -> tuple[TensorHeader, ...]:
    """The tensors of one .safetensors or torch file.

    Raises:
        CheckpointError: the file is missing, damaged, or holds other things than tensors.
    """
    if file.name.endswith(_TORCH_SUFFIXES):
        return read_torch_header(file)
    return read_safetensors_header(file)


def _file_of(path: Path) -> tuple[Path, Kind]:
    """The file that holds or lists the weights of a path, and whether they are an adapter's."""
    if not path.is_dir():
        if path.name == "adapter_model.bin" and path.is_file():
            raise _refuse_pickle([path])
        return path, "adapter" if path.name == "adapter_model.safetensors" else "model"
    weights = find_weights(path)
    if weights is not None:
        return weights
    raise CheckpointError.of(
        "not a checkpoint",
        f"the directory {path} holds {contents(path)}",
        f"one of {', '.join(name for name, _ in _LAYOUTS)} or a .gguf file",
        "give the directory that holds the weights",
    )


def find_weights(directory: Path) -> tuple[Path, Kind] | None:
    """The file that holds (or lists) a directory's weights and whether they are a model or an adapter.

    None when there are no weights at all.

    Raises:
        CheckpointError: the weights are pickled, or which file is meant cannot be told.
    """
    for name, kind in _LAYOUTS:
        if (directory / name).is_file():
            return directory / name, kind
    ggufs = sorted(directory.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0], "model"
    if ggufs:
        raise CheckpointError.of(
            "more than one GGUF file",
            f"the directory {directory} holds {_listed(ggufs)}",
            "one GGUF file",
            f"give one: {ggufs[0]}",
        )
    stray = sorted(directory.glob("*.safetensors"))
    if stray:
        raise CheckpointError.of(
            "which safetensors files belong to the model cannot be told",
            f"the directory {directory} holds {_listed(stray)}",
            "model.safetensors, or shards listed in model.safetensors.index.json",
            "copy the index along with the shards, or name a single file model.safetensors",
        )
    pickles = sorted(
        file
        for file in directory.iterdir()
        if file.name.endswith(_TORCH_SUFFIXES)
        and file.name.startswith(("pytorch_model", "adapter_model", "model"))
    )
    if pickles:
        raise _refuse_pickle(pickles)
    return None


def contents(directory: Path) -> str:
    """The names in a directory, for a message."""
    return _listed(sorted(directory.iterdir())) or "nothing"


def _listed(files: Sequence[Path]) -> str:
    return listed((file.name for file in files), 6)


def _refuse_pickle(files: Sequence[Path]) -> CheckpointError:
    path = files[0]
    if path.name != "adapter_model.bin":
        problem = Problem(
            f"{_listed(files)} in {path.parent}",
            "model.safetensors, pytorch_model.bin, or the index of shards of either",
            "copy the index along with the shards, or give one file itself",
        )
        return CheckpointError("which files belong to the model cannot be told", [problem])
    # Plain tensors: torch reads them without running code.
    fix = (
        f'cd {shlex.quote(str(path.parent))} && python -c "import torch; from safetensors.torch import save_file; '
        "save_file({k: v.contiguous() for k, v in torch.load('adapter_model.bin', weights_only=True).items()}, "
        "'adapter_model.safetensors')\""
    )
    problem = Problem(
        f"{_listed(files)} in {path.parent}",
        "safetensors: reading a pickle runs whatever code its author put in it",
        fix,
    )
    return CheckpointError("the weights are pickled", [problem])
