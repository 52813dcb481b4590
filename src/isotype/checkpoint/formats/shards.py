"""Safetensors files that are written tensor by tensor (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from isotype.core.dtypes import to_safetensors_name

_MOST = 50_000_000_000
"""Bytes in a file, as transformers' `save_pretrained` has it."""
_ENTRY = 192
"""Bytes that a tensor's entry in the header takes at most, beside its name."""
_ALIGNED = 8


class Shards:
    """Writes `model.safetensors`, or several files and their index, one tensor in memory at a time.

    A header comes before the data that it describes: room for it is left, and filled with spaces.

    Args:
        directory: exists.
        room: bytes to leave for a header, at least `header_room` of all names.
        most: bytes of data in a file.
    """

    def __init__(self, directory: Path, room: int, most: int = _MOST) -> None:
        self._directory, self._room, self._most = directory, -(-room // _ALIGNED) * _ALIGNED, most
        self._file: BinaryIO | None = None
        self._entries: dict[str, dict[str, Any]] = {}
        self._files: list[dict[str, dict[str, Any]]] = []
        self._odd: dict[str, torch.Tensor] = {}
        self._at = self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor.

        Raises:
            OSError: it cannot be written.
        """
        if tensor.nbytes % _ALIGNED:  # small ones, without which all others begin at whole words
            self._odd[name] = tensor.detach().clone()
            return
        if self._entries and self._at + tensor.nbytes > self._most:
            self._end()
        self._write(name, tensor)

    def close(self) -> None:
        """Write what is left, and the index where there are several files."""
        # The widest first: each begins at a multiple of its size.
        for name, tensor in sorted(self._odd.items(), key=lambda each: -each[1].itemsize):
            self._write(name, tensor)
        if self._entries or not self._files:
            self._end()
        count = len(self._files)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names):
            self._path(number).rename(self._directory / ("model.safetensors" if count == 1 else name))
        if count > 1:
            where = {each: name for name, entries in zip(names, self._files, strict=True) for each in entries}
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(where.items()))}
            text = json.dumps(index, indent=2) + "\n"
            (self._directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def abandon(self) -> None:
        """Close the file that is being written, whatever is in it."""
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
        while data:  # the system may take a part
            data = data[self._file.write(data) :]
        self._entries[name] = {
            "dtype": to_safetensors_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [self._at, self._at + tensor.nbytes],
        }
        self._at += tensor.nbytes
        self._total += tensor.nbytes

    def _end(self) -> None:
        """The header of the file that is whole now."""
        if self._file is None:  # a model without weights
            self._file = self._path(len(self._files)).open("wb", buffering=0)
        text = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":"))
        header = text.encode().ljust(self._room)
        if len(header) != self._room:
            raise RuntimeError(f"{self._path(len(self._files))}: more names than there was room for")
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.close()
        self._files.append(self._entries)
        self._file, self._entries, self._at = None, {}, 0


def header_room(names: Iterable[str]) -> int:
    """Bytes that a header with tensors of these names takes at most."""
    return 64 + sum(len(json.dumps(name)) + _ENTRY for name in names)
