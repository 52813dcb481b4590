"""Tensors of checkpoint files by way of two buffers: a thread fills one while the tensors of the other go to a GPU.

A GPU copies out of pinned memory at the speed of its bus, and out of mapped files through a buffer of the driver's, page by page.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch

from isotype.checkpoint.formats.tensor import TensorHeader, broken
from isotype.core.errors import first_line

logger = logging.getLogger("isotype")

BUFFER = 256 << 20
"""Bytes of each of the two buffers; a larger tensor is left to the mapped files."""

_ALIGNED = 64  # bytes that a tensor in a buffer begins at a multiple of: no dtype asks for more
_LARGEST_READ = 1 << 30  # Linux reads no more than 2 GiB at once

Work = TypeVar("Work")


@dataclass
class StagedTensors:
    """Tensors that lie in a buffer, until the next ones are asked for; what is kept of them has to be copied."""

    buffer: torch.Tensor
    at: dict[TensorHeader, int] = field(default_factory=dict)

    def tensor(self, header: TensorHeader) -> torch.Tensor:
        """A tensor as it is stored, of the header's shape and dtype; bytes `[header.bytes]` where torch lacks its dtype."""
        begin = self.at[header]
        raw = self.buffer[begin : begin + header.bytes]
        return raw if header.dtype is None else raw.view(header.dtype).view(header.shape)


def staged(
    work: Sequence[tuple[Work, Sequence[TensorHeader]]], size: int = BUFFER, *, pinned: bool
) -> Generator[tuple[Work, StagedTensors | None], None, None]:
    """Every piece of work in its order, with its tensors in a buffer; None for what is to be read in another way.

    The tensors of a piece are there until the next is asked for. Memory is that of two buffers. Whatever ends the caller, an
    interrupt among it, ends the thread.

    Args:
        work: pieces of work, each with the tensors that it needs; more bytes than `size`, or a tensor whose file does not say
            where it begins, are left to the caller.
        size: bytes of a buffer.
        pinned: whether the buffers are in memory that a GPU can read from; where the system has none to give, a line says so.

    Raises:
        CheckpointError: a file ends before a tensor does.
        OSError: a file cannot be read.
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
    """As many neighbours as fit into a buffer; what fits into none is in a group with them, without tensors."""
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
    """Nobody waits for more."""


def _fill(
    group: Sequence[tuple[Work, Sequence[TensorHeader] | None]],
    free: SimpleQueue[torch.Tensor | None],
    files: _Files,
    stop: threading.Event,
) -> list[tuple[Work, StagedTensors | None]]:
    """In the thread: read the tensors of a group into the next free buffer; without any, nothing is waited for."""
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
    """Files that are open for reading, each once."""

    def __missing__(self, path: Path) -> FileIO:
        return self.setdefault(path, FileIO(path))


def _read(file: FileIO, header: TensorHeader, into: memoryview) -> None:
    """Read the bytes of a tensor."""
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
