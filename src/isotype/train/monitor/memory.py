"""Measures the peak memory of an optimizer step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

SAMPLING_SECONDS = 0.02


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


MemoryMeter = _Allocated | _Resident
"""A meter's method `peak` returns the largest memory in use, in bytes, since the last call of `restart`."""


@contextmanager
def memory_meter(device: torch.device) -> Iterator[MemoryMeter]:
    """Yield a meter of the memory of `device` during a run.

    On CUDA, ROCm and XPU, the meter reads PyTorch's peak of allocated bytes. On other devices, the meter samples the
    resident memory of this process every `SAMPLING_SECONDS` and can miss shorter peaks. The kernel's peak (`ru_maxrss`)
    is not used, because it includes the peak of loading and cannot be reset.
    """
    if device.type in ("cuda", "xpu"):
        yield _Allocated(device)
        return
    with _Resident() as meter:
        yield meter
