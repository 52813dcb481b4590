"""Measures the peak memory of an optimizer step, and the largest output values of each block."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn

from isotype.core.dtypes import dtype_name
from isotype.model.walk import blocks_in
from isotype.report.run.headroom import Headroom, HeadroomSample

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

    def restart(self) -> None:
        with self._lock:
            self._peak = self._process.memory_info().rss

    def peak(self) -> int:
        with self._lock:
            self._peak = max(self._peak, self._process.memory_info().rss)
            return self._peak

    def sample(self, stop: threading.Event) -> None:
        while not stop.wait(SAMPLING_SECONDS):
            self.peak()


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
    meter, stop = _Resident(), threading.Event()
    thread = threading.Thread(target=meter.sample, args=(stop,), name="isotype-memory", daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        stop.set()
        thread.join()


_EVERY = 50
"""Largest number of steps between two samples. A short run is sampled more often, about twenty times."""


class HeadroomMeter:
    """Samples the largest magnitude of each block's output, in the first micro-batch of some steps."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        self._blocks = {names[id(block)]: block for block in blocks_in(model, fewest=2)}
        self._every = min(_EVERY, max(1, steps // 20))
        self._handles: dict[str, Any] = {}
        self._largest: dict[str, torch.Tensor] = {}
        self._samples: list[HeadroomSample] = []
        self._dtype = "float16"

    def begin_step(self, step: int) -> None:
        """Begin step number `step` (counted from 1). Install forward hooks if the step is sampled."""
        self._leave()
        if (step - 1) % self._every == 0:
            self._handles = {
                name: block.register_forward_hook(partial(self._look, name))
                for name, block in self._blocks.items()
            }

    def end_step(self, step: int) -> None:
        """Read the sample if the step was sampled. Reading makes the host wait for the device."""
        self._leave()
        if self._largest:
            self._blocks = {name: block for name, block in self._blocks.items() if name in self._largest}
            values = torch.stack([self._largest[name].float() for name in self._blocks]).tolist()
            finite = (math.inf if math.isnan(value) else value for value in values)  # NaN follows an overflow
            self._samples.append(HeadroomSample(step, tuple(finite)))
            self._largest.clear()

    def record(self) -> Headroom | None:
        """Return the samples so far, or None if there is no sample (as in a model without blocks)."""
        if not self._samples:
            return None
        return Headroom(tuple(self._blocks), self._dtype, tuple(self._samples))

    def _look(self, name: str, block: nn.Module, args: Any, result: Any) -> None:
        if block is not self._blocks.get(name):
            return  # a block of the copy that the preflight traces
        handle = self._handles.pop(name, None)
        if handle is None or not block.training:
            return
        handle.remove()
        value = result[0] if isinstance(result, (tuple, list)) else result
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            self._dtype = dtype_name(value.dtype)
            self._largest[name] = torch.linalg.vector_norm(value.detach(), torch.inf)

    def _leave(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
