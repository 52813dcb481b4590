"""The description of a tensor in a checkpoint's file, and the errors of damaged files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.core.errors import CheckpointError, Problem

if TYPE_CHECKING:
    import torch

MAX_TENSORS = 250_000  # a mixture of 384 experts in 61 layers has 140,000 tensors
DAMAGED = "the file is damaged: download, copy or save it again"


@dataclass(frozen=True)
class TensorHeader:
    """A tensor as described in its file.

    Attributes:
        dtype_name: name of the dtype in the file, such as `"BF16"`. In a GGUF file, it may be a block type such as `"Q4_1"`.
        shape: sizes in torch's order, with the slowest dimension first.
        begin: offset of the tensor's first byte in the file; 0 if the file has no offset for the tensor.
    """

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    bytes: int
    file: Path
    begin: int = 0

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype; None for a block-quantized GGUF type or a dtype that torch lacks."""
        from isotype.core.dtypes import from_safetensors_name  # headers are read without importing torch

        return from_safetensors_name(self.dtype_name)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def printable(name: str) -> bool:
    """Return True if UTF-8 can encode a name. JSON also allows lone surrogates, but they cannot be written or printed."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def by_name(tensors: Iterable[TensorHeader]) -> tuple[TensorHeader, ...]:
    return tuple(sorted(tensors, key=lambda tensor: tensor.name))


def repeated(names: Iterable[str], noun: str = "") -> list[Problem]:
    """Return a problem for each name that occurs twice."""
    twice = (name for name, count in Counter(names).items() if count > 1)
    return [Problem(f"{noun}{name!r} twice", "each name once", DAMAGED) for name in twice]


@dataclass(frozen=True)
class HeaderFile:
    """A file whose header is read, and the errors of a damaged file."""

    path: Path

    def damaged(self, problems: Sequence[Problem]) -> CheckpointError:
        """Return the error for a damaged file. It has only the first problems, because a damaged header can have thousands."""
        return CheckpointError.first_of(f"cannot read {self.path}", problems)

    def broken(self, what: str, expected: str, fix: str = DAMAGED) -> CheckpointError:
        return self.damaged([Problem(what, expected, fix)])

    def size(self) -> int:
        """Return the size of the file in bytes. Raise CheckpointError if the file does not exist."""
        if not self.path.is_file():
            fix = "check the path, or download the file"
            raise CheckpointError.of("no such file", str(self.path), "an existing file", fix)
        return self.path.stat().st_size

    def limit_tensors(self, count: int) -> None:
        """Raise CheckpointError if there are more tensors than any model has. Reading so many headers would take minutes."""
        if count > MAX_TENSORS:
            most = f"at most {MAX_TENSORS:,}"
            raise self.broken(f"{count:,} tensors", most, "use a checkpoint of a model")

    def parsed(self, text: bytes, header: str = "", noun: str = "") -> Any:
        """Return parsed JSON. Raise CheckpointError for other text, or if an object has a name twice.

        Without this check, `json` would keep only the last value of such a name. The arguments `header` and `noun`
        are for the error messages.
        """
        problems: list[Problem] = []

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            entries = dict(pairs)
            if len(entries) < len(pairs):
                problems.extend(repeated((name for name, _ in pairs), noun))
            return entries

        try:
            content = json.loads(text, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise self.broken(f"{header}not JSON ({error})", "a JSON object") from error
        if problems:
            raise self.damaged(problems)
        return content
