"""The most memory that a process, or its device, has in use during an optimizer step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import psutil
import torch

SAMPLING_SECONDS = 0.02
"""Time between two looks at the resident size of the process."""


class MemoryMeter(Protocol):
    """The most memory in use since a moment."""

    def restart(self) -> None:
        """Forget what was; start with what is in use now."""

    def peak(self) -> int:
        """Bytes, the most since `restart`."""


@contextmanager
def memory_meter(device: torch.device) -> Iterator[MemoryMeter]:
    """A meter for the time of a run.

    On CUDA, ROCm and XPU it is torch's own count of what it has allocated on `device`, which misses no peak. Else it
    is the resident size of this process, looked at every `SAMPLING_SECONDS` and at both ends: a peak between two
    looks is missed. (The kernel's own mark, `ru_maxrss`, cannot be set back, and starts with the peak of loading.)
    """
    if device.type in ("cuda", "xpu"):
        yield _Allocated(device)
        return
    with _Resident() as meter:
        yield meter


class _Allocated:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend = torch.get_device_module(device)

    def restart(self) -> None:
        self._backend.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return int(self._backend.max_memory_allocated(self._device))


class _Resident:
    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="isotype-memory", daemon=True)

    def __enter__(self) -> _Resident:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()

    def restart(self) -> None:
        with self._lock:
            self._peak = self._size()

    def peak(self) -> int:
        with self._lock:
            self._peak = max(self._peak, self._size())
            return self._peak

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLING_SECONDS):
            self.peak()

    def _size(self) -> int:
        return int(self._process.memory_info().rss)
