"""Reads the tensors of files that `torch.save` wrote, without unpickling anything else."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.checkpoint.formats.tensor import DAMAGED, HeaderFile, TensorHeader, printable
from isotype.compat.torch import file_offset
from isotype.core.errors import Problem

if TYPE_CHECKING:
    import torch

# Exceptions of `torch.load` for a file that `torch.save` has not written, or that is damaged.
_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, LookupError),
    *(TypeError, AttributeError, ArithmeticError, AssertionError, ImportError, MemoryError, RecursionError),
)
_REFUSED = re.compile(
    r"unsupported (?:global: )?global (\S+)|unsupported (?:class|operand) [^\n]*", re.IGNORECASE
)
_WEIGHTS = "pass the file with the weights: torch.save(model.state_dict(), …)"
# Keys under which training scripts store the state dict.
_NESTED = ("state_dict", "model")


def read_torch_header(path: Path) -> tuple[TensorHeader, ...]:
    """Return the headers of the tensors in a file; raise the errors of `torch_tensors`."""
    return tuple(_header(name, value, path) for name, value in torch_tensors(path, "meta").items())


def torch_tensors(path: Path, device: str = "cpu") -> Mapping[str, torch.Tensor]:
    """Return a file's tensors by name. Tensors on the CPU are memory-mapped. Tensors on the meta device have no values.

    Raises CheckpointError if the file is damaged or older than torch 1.6. No code is run, because only tensors are
    unpickled.
    """
    import torch

    file = HeaderFile(path)
    size = file.size()
    with path.open("rb") as content:
        start = content.read(2)
    if start != b"PK":
        raise file.damaged([_not_an_archive(start, size)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about deprecated storages in old files
            content = torch.load(path, weights_only=True, mmap=True, map_location=device)
    except _UNREADABLE as error:
        raise file.damaged([_what_failed(error)]) from error
    tensors = _weights(content)
    if isinstance(tensors, Problem):
        raise file.damaged([tensors])
    for name, value in tensors.items():
        begin = file_offset(value.untyped_storage())
        end = 0 if begin is None else begin + value.untyped_storage().nbytes()
        if end > size:
            what = f"tensor {name!r} ends at byte {end}, the file at byte {size}"
            raise file.broken(what, "a complete file")
    return tensors


def _weights(content: Any) -> Mapping[str, torch.Tensor] | Problem:
    import torch

    if isinstance(content, Mapping):
        nested = [content[key] for key in _NESTED if isinstance(content.get(key), Mapping)]
        content = nested[0] if len(nested) == 1 else content
    if not isinstance(content, Mapping) or not content:
        what = f"a {type(content).__name__}"
        return Problem(what, "tensors by their names", "pass the file with the weights")
    for name, value in content.items():
        if not isinstance(name, str) or not printable(name):
            return Problem(f"the name {name!r}", "text", _WEIGHTS)
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            kind = f"{value.layout} tensor" if isinstance(value, torch.Tensor) else type(value).__name__
            return Problem(f"{name!r}: a {kind}", "dense tensors with their names", _WEIGHTS)
    return content


def _header(name: str, value: torch.Tensor, path: Path) -> TensorHeader:
    from isotype.core.dtypes import to_safetensors_name

    # torch records the offset in the file also for storages on the meta device.
    begin = file_offset(value.untyped_storage()) if value.is_contiguous() else None
    begin = 0 if begin is None else begin + int(value.storage_offset()) * value.element_size()
    shape, dtype = tuple(value.shape), to_safetensors_name(value.dtype)
    return TensorHeader(name, dtype, shape, value.numel() * value.element_size(), path, begin)


def _not_an_archive(start: bytes, size: int) -> Problem:
    if start[:1] == b"\x80":
        return Problem(
            "a bare Python pickle, which may run code when it is read",
            "the archive that torch.save writes since torch 1.6",
            "use the checkpoint in safetensors; if you trust its author, call torch.load once, and torch.save again",
        )
    return Problem(f"{size} bytes that begin with {start!r}", "the archive that torch.save writes", DAMAGED)


def _what_failed(error: BaseException) -> Problem:
    text = str(error)
    refused = _REFUSED.search(text)
    if isinstance(error, pickle.UnpicklingError) and refused:
        what = refused[1] or refused[0]
        expected = "only tensors, because unpickling anything else may run code"
        fix = "use the checkpoint in safetensors; do not load this file unless you trust its author"
        return Problem(f"a pickle of other objects than tensors: {what}", expected, fix)
    if isinstance(error, NotImplementedError):
        # torch from 2.14 on compares a sparse tensor's indices with its size, which a tensor without values lacks.
        return Problem("a sparse tensor", "dense tensors with their names", _WEIGHTS)
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return Problem(f"not readable by torch ({first[:200]})", "what torch.save writes", DAMAGED)
