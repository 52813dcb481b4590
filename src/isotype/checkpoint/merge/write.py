"""Writes a merged model (dense, in the format of bitsandbytes, or as a GGUF file), and opens it again."""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch

from isotype.checkpoint.block_streaming import DeferredBlocks
from isotype.checkpoint.checkpoint import require_readable
from isotype.checkpoint.export import exportable_tokenizer, quantize_by_llama_cpp, write_tensors
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.load import load
from isotype.checkpoint.merge.layers import Merging
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.weightless import skeleton
from isotype.compat.torch import own_state
from isotype.compat.transformers import conversions, name_of, never_saved, set_conversions
from isotype.core.cache import why_unusable
from isotype.core.dtypes import GGUF_TYPES, LLAMA_CPP_TYPES, to_safetensors_name
from isotype.core.errors import SaveError, UsageError
from isotype.core.files import (
    NO_ROOM,
    directory_lock,
    fsync_tree,
    publish_directory,
    publish_file,
    remove_abandoned,
    write_failure,
)
from isotype.core.formats import QUANTIZATIONS
from isotype.core.names import format_bytes
from isotype.model.boundary import original_class
from isotype.model.walk import is_tuner_layer, places

FORMATS = (*QUANTIZATIONS, *GGUF_TYPES)
"""Storage formats of a merged model besides dense safetensors."""


_BUILDING = ".isotype-merging"
_WRITABLE = "a writable directory on a disk with free space"


@dataclass(frozen=True)
class Output:
    """The directory in which a merge writes a model, or a GGUF file if the name ends in `.gguf`."""

    path: Path

    @property
    def file(self) -> bool:
        return self.path.suffix == ".gguf"

    def check(self) -> None:
        """Raise UsageError if a file would be overwritten or no folder can be created, or SaveError if the disk is full."""
        output, file = self.path, self.file
        if why := why_unusable(output.parent):
            if why in map(os.strerror, NO_ROOM):
                raise _no_room(output, why, _WRITABLE)
            what, expected = f"--output {output}: {why}", "a directory that can be created"
            raise UsageError.of("cannot write to the output directory", what, expected, "give another one")
        if output.is_dir() and not file and not any(output.iterdir()):
            return
        if output.exists():
            kind = "a directory" if file else "a directory with files in it"
            existing = f"--output {output}: {kind if output.is_dir() else 'a file'}"
            what = "file" if file else "directory"
            expected = f"a {what} that does not exist yet" + ("" if file else ", or an empty one")
            fix = f"use another {what}, or remove this one first"
            raise UsageError.of(f"the output {what} already exists", existing, expected, fix)

    def model_in(self, directory: Path, stored: str | None) -> Path:
        """Return `directory`, or the path of a GGUF file in `directory` if `stored` is a GGUF type."""
        if stored not in GGUF_TYPES:
            return directory
        return directory / (self.path.name if self.file else f"model-{stored}.gguf")

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield a temporary folder. At the end, the folder is renamed to `path`, or removed after an error.

        Temporary folders of killed merges are removed, too.
        """
        output = self.path
        fresh = output.parent / f".{output.name}.{uuid.uuid4().hex}"
        built = fresh.with_name(fresh.name + _BUILDING)
        try:
            with self.disk_errors():
                remove_abandoned(output.parent.glob(f".*{_BUILDING}"))
                fresh.mkdir(parents=True)
            # Locked before: another merge would remove a folder that no process has locked.
            with directory_lock(fresh):
                fresh.rename(built)
                yield built
            self.check()  # again: another program may have created it in the meantime
            with self.disk_errors():
                require_readable(built)
                fsync_tree(built)
                if self.file:
                    publish_file(built / output.name, output)
                else:
                    publish_directory(built, output)
        finally:
            shutil.rmtree(built, ignore_errors=True)

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn an error of the disk into a SaveError that names `path`."""
        try:
            yield
        except SaveError:
            raise
        except Exception as error:
            failure = write_failure(error, self.path.parent)
            if failure is None:
                raise
            number, reason = failure
            full = "the disk is full: " if number in NO_ROOM else ""
            raise _no_room(self.path, f"{full}{reason}", _WRITABLE) from error


def write_merged(
    merging: Merging, tokenizer: Any, path: Path, dtype: torch.dtype, stored: str | None
) -> list[str]:
    """Write the merged model and its tokenizer, with one block in memory at a time. Return notes.

    Args:
        tokenizer: tokenizer or processor, or None.
        path: an existing, empty directory, or a GGUF file in such a directory.
        stored: None for dense safetensors, else one of `FORMATS`.
    """
    shapes, config = merging.shapes, merging.model.config
    directory = path.parent if stored in GGUF_TYPES else path
    needed = sum(value.nbytes for value in shapes.values())
    free = shutil.disk_usage(directory).free
    if free < needed:
        expected = f"{format_bytes(needed)} for the weights"
        raise _no_room(directory.parent, f"{format_bytes(free)} are free", expected)
    if stored in GGUF_TYPES:
        words = exportable_tokenizer(tokenizer)
        name = Path(str(name_of(config))).stem or "model"
        values = chain.from_iterable(part.items() for part in merging.parts())
        if stored not in LLAMA_CPP_TYPES:
            return write_tensors(config, shapes, values, words, path, str(stored), f"{name} merged")
        whole = directory / "f32.gguf"
        notes = write_tensors(config, shapes, values, words, whole, "f32", f"{name} merged")
        notes += quantize_by_llama_cpp(whole, path, str(stored))
        whole.unlink()
        return notes
    dense = directory / "dense" if stored in QUANTIZATIONS else directory
    dense.mkdir(exist_ok=True)
    room = header_room(saved_form(without_adapters(merging.model), shapes))
    write_model(merging.model, merging.parts(), dense, dtype, room)
    if stored in QUANTIZATIONS:
        _quantize(dense, directory, type(merging.model), dtype, stored)
        shutil.rmtree(dense)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return []


def _quantize(dense: Path, directory: Path, model_class: Any, dtype: torch.dtype, stored: str) -> None:
    """Quantize the dense model in the folder `dense` to a bitsandbytes format, and write it as transformers does."""
    policy = replace(resolve_precision(dense, dtype, stored, "cpu"), device="cpu")
    deferred = DeferredBlocks()
    model = load(dense, policy, model_class=model_class, deferred=deferred)
    room = header_room(header.name for header in read_headers(dense).tensors)
    quantized = (place.name for place in places(model) if place.kind in ("linear4bit", "linear8bit"))
    room += _CONSTANTS * header_room(f"{name}.weight" for name in quantized)
    parts = (
        {n: deferred.stored.read(n) if n in deferred.other_dtypes else value for n, value in part.items()}
        for part in _state(model, deferred)
    )
    write_model(model, parts, directory, dtype, room)


_CONSTANTS = 6
"""Maximum number of tensors that bitsandbytes stores for a quantized weight."""


def _state(model: Any, deferred: DeferredBlocks) -> Iterator[dict[str, torch.Tensor]]:
    inside = tuple(f"{block.name}." for block in deferred.blocks)
    tied = getattr(model, "all_tied_weights_keys", {})
    outside: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not f"{name}.".startswith(inside):
            own_state(module, outside, f"{name}." if name else "")
    # A tensor that several names share is saved once, under the name that the other names are tied to.
    once = {id(value): name for name, value in sorted(outside.items(), key=lambda item: item[0] not in tied)}
    yield {name: outside[name] for name in once.values()}
    for block in deferred.blocks:
        deferred.read(block)
        yield block.module.state_dict(prefix=f"{block.name}.")
        deferred.drop(block)


def write_model(
    model: Any, parts: Iterable[Mapping[str, torch.Tensor]], directory: Path, dtype: torch.dtype, room: int
) -> None:
    """Write a model's parts as `save_pretrained` would. `dtype` is for the config. `room` is the number of bytes for a header."""
    left_out, plain = never_saved(model), without_adapters(model)
    shards = Shards(directory, room)
    try:
        for part in parts:
            to_save = {name: value for name, value in part.items() if name not in left_out}
            for name, value in saved_form(plain, to_save).items():
                shards.add(name, value)
        shards.close()
    finally:
        shards.abandon()
    model.config.architectures = [original_class(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def without_adapters(model: Any) -> Any:
    """If `model` has adapters, return the same model without adapters and without values; else return `model`."""
    if not any(map(is_tuner_layer, model.modules())):
        return model
    blank = skeleton(model.config, torch.float32, model_class=original_class(model))
    set_conversions(blank, conversions(model))
    return blank


def saved_form(model: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Convert the tensors of a model into tensors of a checkpoint, by the reverse of transformers' conversions."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted: Mapping[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return reverted


def _no_room(place: Path, what: str, expected: str) -> SaveError:
    headline, fix = "the merged model cannot be written", "free some space, or set --output on another disk"
    hint = "the adapter and its base are unchanged, and no partial file remains: run the same command again"
    return SaveError.of(headline, f"{place}: {what}", expected, fix, hint=hint)


_MOST = 50_000_000_000
"""Maximum bytes of data in a file, as in transformers' `save_pretrained`."""
_ENTRY = 192
"""Maximum bytes of a tensor's entry in the header, without the tensor's name."""
_ALIGNED = 8


class Shards:
    """Writer of `model.safetensors`, or of several files and their index, with one tensor in memory at a time.

    A file begins with its header. The header is written last into reserved bytes, and padded with spaces.

    Args:
        directory: an existing directory.
        room: bytes to reserve for a header. It must be at least the result of `header_room` for the names of all tensors.
    """

    def __init__(self, directory: Path, room: int) -> None:
        self._directory, self._room = directory, -(-room // _ALIGNED) * _ALIGNED
        self._file: BinaryIO | None = None
        self._entries: dict[str, dict[str, Any]] = {}
        self._files: list[dict[str, dict[str, Any]]] = []
        self._unaligned: dict[str, torch.Tensor] = {}
        self._at = self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.nbytes % _ALIGNED:  # written last, so that all other tensors are aligned
            self._unaligned[name] = tensor.detach().clone()
            return
        if self._entries and self._at + tensor.nbytes > _MOST:
            self._end()
        self._write(name, tensor)

    def close(self) -> None:
        """Write the tensors that `add` has postponed, the last header, and the index if there are several files."""
        # The widest dtype first: each tensor begins at a multiple of its element size.
        for name, tensor in sorted(self._unaligned.items(), key=lambda item: -item[1].itemsize):
            self._write(name, tensor)
        if self._entries:
            self._end()
        count = len(self._files)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names):
            self._path(number).rename(self._directory / ("model.safetensors" if count == 1 else name))
        if count > 1:
            files = zip(names, self._files, strict=True)
            where = {entry: name for name, entries in files for entry in entries}
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(where.items()))}
            text = json.dumps(index, indent=2) + "\n"
            (self._directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()

    def _path(self, number: int) -> Path:
        return self._directory / f"model-{number}.part"

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        if self._file is None:
            self._file = self._path(len(self._files)).open("wb", buffering=0)
            self._file.seek(8 + self._room)
        flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        data = memoryview(flat)
        while data:  # one call may write only a part
            data = data[self._file.write(data) :]
        self._entries[name] = {
            "dtype": to_safetensors_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [self._at, self._at + tensor.nbytes],
        }
        self._at += tensor.nbytes
        self._total += tensor.nbytes

    def _end(self) -> None:
        assert self._file is not None
        text = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":"))
        header = text.encode().ljust(self._room)
        if len(header) != self._room:
            raise RuntimeError(f"{self._path(len(self._files))}: the header is too long")
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.close()
        self._files.append(self._entries)
        self._file, self._entries, self._at = None, {}, 0


def header_room(names: Iterable[str]) -> int:
    """Return the maximum size in bytes of a safetensors header with these tensor names."""
    return 64 + sum(len(json.dumps(name)) + _ENTRY for name in names)
