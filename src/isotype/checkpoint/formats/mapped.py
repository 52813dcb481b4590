"""Reads the tensors of checkpoint files: maps them into memory without copies, or reads them ahead into two buffers."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import torch

from isotype.checkpoint.formats.tensor import HeaderFile, TensorHeader
from isotype.checkpoint.formats.torch_file import torch_tensors
from isotype.core.errors import first_line

# Advice of POSIX's madvise. Without madvise, pages stay in memory until the system needs the memory.
_AHEAD: int | None = getattr(mmap, "MADV_WILLNEED", None)
_DONE: int | None = getattr(mmap, "MADV_DONTNEED", None)


class MappedFiles:
    """The files of a checkpoint. They are mapped until the last of their tensors is freed. Writing into such a tensor changes no file."""

    def __init__(self) -> None:
        self._storages: dict[Path, Any] = {}

    def tensor(self, header: TensorHeader) -> torch.Tensor:
        """Return the tensor (or rows of a tensor) that `header` describes. If torch lacks the dtype, return bytes."""
        if not header.begin:  # a tensor that is not contiguous in its torch file
            return torch_tensors(header.file)[header.name].contiguous()
        raw = self._span(header)
        if header.dtype is None:
            return raw
        if raw.data_ptr() % header.dtype.itemsize:  # the file does not align its tensors
            raw = raw.clone()
        return raw.view(header.dtype).view(header.shape)

    def ahead(self, headers: Iterable[TensorHeader]) -> None:
        self._advise(headers, _AHEAD)

    def release(self, headers: Iterable[TensorHeader]) -> None:
        """Free the memory of these tensors. At the next use, a tensor is read from its file again. Changed values are lost."""
        self._advise(headers, _DONE)

    def holds(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        spans = ((storage.data_ptr(), storage.nbytes()) for storage in self._storages.values())
        return any(begin <= at < begin + size for begin, size in spans)

    def _span(self, header: TensorHeader) -> torch.Tensor:
        whole = self._storages.get(header.file)
        if whole is None:
            size = header.file.stat().st_size
            file = torch.UntypedStorage.from_file(str(header.file), False, size)
            whole = self._storages[header.file] = file
        # A storage for this tensor alone: code that saves, shares or compares storages must not take the whole file.
        span = whole[header.begin : header.begin + header.bytes]
        return torch.empty(0, dtype=torch.uint8).set_(span)

    def _advise(self, headers: Iterable[TensorHeader], advice: int | None) -> None:
        if advice is None:
            return
        madvise = _madvise()
        for header in headers:
            raw = self._span(header)
            # Only whole pages: the first and the last page may also hold bytes of neighbouring tensors.
            begin = -(-raw.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (raw.data_ptr() + header.bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                madvise(begin, end - begin, advice)


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


# ---------------------------------------------------------------------------------------- two buffers, for a GPU
# A thread fills one buffer while the other is copied. A GPU copies from pinned memory at bus speed, but from mapped
# files page by page through a buffer of the driver.

logger = logging.getLogger("isotype")

BUFFER = 256 << 20
"""Bytes of each of the two buffers. Larger tensors are read from mapped files."""

_ALIGNED = 64  # alignment of tensors in a buffer, in bytes
_LARGEST_READ = 1 << 30  # bytes; one read of Linux returns less than 2 GiB

Work = TypeVar("Work")


@dataclass
class StagedTensors:
    """Tensors in a buffer. They are valid until the generator `staged` resumes."""

    buffer: torch.Tensor
    at: dict[TensorHeader, int] = field(default_factory=dict)

    def tensor(self, header: TensorHeader) -> torch.Tensor:
        """Return a tensor, or rows of a tensor, from the buffer, as `MappedFiles.tensor` does."""
        names = (header.file, header.name)
        whole = header if header in self.at else next(h for h in self.at if (h.file, h.name) == names)
        begin = self.at[whole] + header.begin - whole.begin
        raw = self.buffer[begin : begin + header.bytes]
        return raw if header.dtype is None else raw.view(header.dtype).view(header.shape)


Tensors = MappedFiles | StagedTensors
"""Tensors in mapped files or in a buffer."""


def staged(
    work: Sequence[tuple[Work, Sequence[TensorHeader]]], size: int = BUFFER
) -> Generator[tuple[Work, StagedTensors | None], None, None]:
    """Yield (item, buffer with its tensors) in the order of `work`, or (item, None) if the caller must read the
    tensors.

    Tensors are valid until the generator resumes. Closing the generator ends its thread, which reads ahead.

    Args:
        work: pairs (item, headers of its tensors). The caller must read the tensors if a header has no offset, or if the
            tensors need more than `size` bytes.
    """
    groups = list(_groups(work, size))
    buffers = [_buffer(size) for _ in groups[:2]]
    stop, files = threading.Event(), _Files()
    fill = partial(_fill, files=files, stop=stop)
    reader = ThreadPoolExecutor(1, "isotype-reader")
    try:
        ahead = [reader.submit(fill, *pair) for pair in zip(groups, buffers, strict=False)]
        for at, filled in enumerate(ahead):
            yield from filled.result()
            # The caller has used this buffer. It is filled again while the caller uses the other one.
            if at + 2 < len(groups):
                ahead.append(reader.submit(fill, groups[at + 2], buffers[at % 2]))
    finally:
        stop.set()
        reader.shutdown(cancel_futures=True)
        for file in files.values():
            file.close()


def _groups(
    work: Iterable[tuple[Work, Sequence[TensorHeader]]], size: int
) -> Iterator[list[tuple[Work, Sequence[TensorHeader] | None]]]:
    """Yield groups of consecutive items that fit into one buffer. Items that use no buffer have None as headers."""
    group: list[tuple[Work, Sequence[TensorHeader] | None]] = []
    room = size
    for piece, headers in work:
        bytes_needed = sum(map(_space, headers))
        if bytes_needed > size or any(not header.begin for header in headers):
            group.append((piece, None))
            continue
        if bytes_needed > room:
            yield group
            group, room = [], size
        group.append((piece, headers))
        room -= bytes_needed
    if group:
        yield group


def _space(header: TensorHeader) -> int:
    return -(-header.bytes // _ALIGNED) * _ALIGNED


def _fill(
    group: Sequence[tuple[Work, Sequence[TensorHeader] | None]],
    buffer: torch.Tensor,
    files: _Files,
    stop: threading.Event,
) -> list[tuple[Work, StagedTensors | None]]:
    tensors, end = StagedTensors(buffer), 0
    memory = buffer.numpy().data
    for header in (header for _, headers in group for header in headers or ()):
        if stop.is_set():
            break
        _read(files[header.file], header, memory[end : end + header.bytes])
        tensors.at[header] = end
        end += _space(header)
    return [(piece, None if headers is None else tensors) for piece, headers in group]


class _Files(dict[Path, FileIO]):
    def __missing__(self, path: Path) -> FileIO:
        return self.setdefault(path, FileIO(path))


def _read(file: FileIO, header: TensorHeader, into: memoryview) -> None:
    file.seek(header.begin)
    done = 0
    while done < header.bytes:
        count = file.readinto(into[done : done + _LARGEST_READ])
        if not count:
            what = f"the file contains only {done} of the {header.bytes} bytes of {header.name}"
            raise HeaderFile(header.file).broken(what, "the whole tensor")
        done += count


def _buffer(size: int) -> torch.Tensor:
    """Return a buffer in pinned memory. If that fails, log a warning and use other memory."""
    size += 1  # `Filler.place` would keep a tensor that fills the whole buffer, without a copy
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        reason = first_line(error)
        logger.warning("weights are copied to the GPU more slowly, without pinned memory: %s", reason)
        return torch.empty(size, dtype=torch.uint8)
