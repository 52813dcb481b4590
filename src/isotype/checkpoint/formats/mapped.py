"""Tensors of checkpoint files as memory maps, without copies."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.formats.torch_file import torch_tensors

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
        """Return True if a tensor is in one of the files."""
        at = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        return any(
            storage.data_ptr() <= at < storage.data_ptr() + storage.nbytes()
            for storage in self._storages.values()
        )

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
