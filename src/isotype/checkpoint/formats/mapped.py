"""Tensors of checkpoint files: memory-mapped without copies, or read ahead into two buffers for a GPU."""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from isotype.checkpoint.formats.tensor import TensorHeader, broken
from isotype.checkpoint.formats.torch_file import torch_tensors
from isotype.core.errors import first_line

# POSIX: how the kernel is told what is needed next, and what no more. Where it cannot be told, pages stay until the
# system wants their memory.
_AHEAD: int | None = getattr(mmap, "MADV_WILLNEED", None)
_DONE: int | None = getattr(mmap, "MADV_DONTNEED", None)


class MappedFiles:
    """The files of a checkpoint, each mapped once, privately: writing into a tensor changes no file.

    A map is closed with its last tensor.
    """

    def __init__(self) -> None:
        self._storages: dict[Path, Any] = {}

    def tensor(self, header: TensorHeader) -> torch.Tensor:
        """Return a tensor of the header's shape and dtype; bytes `[header.bytes]` if torch lacks its dtype."""
        if not header.begin:  # torch saved it with other strides
            return torch_tensors(header.file)[header.name].contiguous()
        raw = self._span(header)
        if header.dtype is None:
            return raw
        if raw.data_ptr() % header.dtype.itemsize:  # of a file that aligns nothing
            raw = raw.clone()
        return raw.view(header.dtype).view(header.shape)

    def ahead(self, headers: Iterable[TensorHeader]) -> None:
        """Ask the system to read these ahead."""
        self._advise(headers, _AHEAD)

    def release(self, headers: Iterable[TensorHeader]) -> None:
        """Free the memory of these. A tensor used again is read again; changes to it are lost."""
        self._advise(headers, _DONE)

    def holds(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        spans = ((each.data_ptr(), each.nbytes()) for each in self._storages.values())
        return any(begin <= at < begin + size for begin, size in spans)

    def _span(self, header: TensorHeader) -> torch.Tensor:
        whole = self._storages.get(header.file)
        if whole is None:
            size = header.file.stat().st_size
            whole = self._storages[header.file] = torch.UntypedStorage.from_file(
                str(header.file), False, size
            )
        # A storage of its own: what is saved, shared or compared by storage is this tensor and not the file.
        span = whole[header.begin : header.begin + header.bytes]
        return torch.empty(0, dtype=torch.uint8).set_(span)

    def _advise(self, headers: Iterable[TensorHeader], advice: int | None) -> None:
        if advice is None:
            return
        madvise = _madvise()
        for header in headers:
            raw = self._span(header)
            # Whole pages: those at the ends are shared with the tensors beside it.
            begin = -(-raw.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (raw.data_ptr() + header.bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                madvise(begin, end - begin, advice)


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


# ---------------------------------------------------------------------------------------- two buffers, for a GPU
# A thread fills one buffer while the other is copied. A GPU copies from pinned memory at bus speed, and from mapped files
# through a driver's buffer, page by page.

logger = logging.getLogger("isotype")

BUFFER = 256 << 20
"""Bytes of each of the two buffers; larger tensors are read from mapped files."""

_ALIGNED = 64  # bytes that a tensor in a buffer begins at a multiple of: no dtype asks for more
_LARGEST_READ = 1 << 30  # Linux reads no more than 2 GiB at once

Work = TypeVar("Work")


@dataclass
class StagedTensors:
    """Tensors in a buffer, valid until the next are requested; copy what is kept."""

    buffer: torch.Tensor
    at: dict[TensorHeader, int] = field(default_factory=dict)

    def tensor(self, header: TensorHeader) -> torch.Tensor:
        """Return a tensor of the header's shape and dtype; bytes `[header.bytes]` if torch lacks its dtype."""
        begin = self.at[header]
        raw = self.buffer[begin : begin + header.bytes]
        return raw if header.dtype is None else raw.view(header.dtype).view(header.shape)


def staged(
    work: Sequence[tuple[Work, Sequence[TensorHeader]]], size: int = BUFFER, *, pinned: bool
) -> Generator[tuple[Work, StagedTensors | None], None, None]:
    """Yield every piece of work in order, with its tensors in a buffer, or None if it must be read otherwise.

    Tensors are valid until the next piece is requested. The thread ends with the caller, also after an interrupt.

    Args:
        work: pieces of work with their tensors; more bytes than `size`, or a tensor without offset, yields None.
        pinned: use memory that a GPU can read directly; a line is logged if there is none.
    """
    groups = list(_groups(work, size))
    free: SimpleQueue[torch.Tensor | None] = SimpleQueue()
    for _ in range(min(2, len(groups))):
        free.put(_buffer(size, pinned))
    stop, files = threading.Event(), _Files()
    reader = ThreadPoolExecutor(1, "isotype-reader")
    try:
        for filled in [reader.submit(_fill, group, free, files, stop) for group in groups]:
            buffer = None
            for each, tensors in filled.result():
                buffer = tensors.buffer if tensors is not None else buffer
                yield each, tensors
            if buffer is not None:
                free.put(buffer)
    finally:
        stop.set()
        free.put(None)
        reader.shutdown(cancel_futures=True)
        for file in files.values():
            file.close()


def _groups(
    work: Iterable[tuple[Work, Sequence[TensorHeader]]], size: int
) -> Iterator[list[tuple[Work, Sequence[TensorHeader] | None]]]:
    """Yield as many neighbours as fit into a buffer; work that fits into none joins a group without tensors."""
    group: list[tuple[Work, Sequence[TensorHeader] | None]] = []
    room = size
    for each, headers in work:
        bytes_needed = sum(map(_space, headers))
        if bytes_needed > size or any(not header.begin for header in headers):
            group.append((each, None))
            continue
        if bytes_needed > room:
            yield group
            group, room = [], size
        group.append((each, headers))
        room -= bytes_needed
    if group:
        yield group


def _space(header: TensorHeader) -> int:
    return -(-header.bytes // _ALIGNED) * _ALIGNED


class _StoppedError(Exception):
    """The caller has stopped."""


def _fill(
    group: Sequence[tuple[Work, Sequence[TensorHeader] | None]],
    free: SimpleQueue[torch.Tensor | None],
    files: _Files,
    stop: threading.Event,
) -> list[tuple[Work, StagedTensors | None]]:
    """Read the tensors of a group into the next free buffer, in the thread; without tensors, do not wait."""
    if all(headers is None for _, headers in group):
        return [(each, None) for each, _ in group]
    buffer = free.get()
    if buffer is None:
        raise _StoppedError
    tensors, end = StagedTensors(buffer), 0
    memory = buffer.numpy().data
    for header in (header for _, headers in group for header in headers or ()):
        if stop.is_set():
            raise _StoppedError
        _read(files[header.file], header, memory[end : end + header.bytes])
        tensors.at[header] = end
        end += _space(header)
    return [(each, None if headers is None else tensors) for each, headers in group]


class _Files(dict[Path, FileIO]):
    def __missing__(self, path: Path) -> FileIO:
        return self.setdefault(path, FileIO(path))


def _read(file: FileIO, header: TensorHeader, into: memoryview) -> None:
    file.seek(header.begin)
    done = 0
    while done < header.bytes:
        count = file.readinto(into[done : done + _LARGEST_READ])
        if not count:
            what = f"{header.name}: {done} of its {header.bytes} bytes"
            raise broken(header.file, what, "the whole tensor")
        done += count


def _buffer(size: int, pinned: bool) -> torch.Tensor:
    size += 1  # than any tensor: one that is all of its storage would be taken for one that is its own
    if pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            reason = first_line(error)
            logger.warning("weights are copied to the GPU out of pageable memory, more slowly: %s", reason)
    return torch.empty(size, dtype=torch.uint8)
