"""Scratch memory for weights that are dequantized or cast for one product.

Owned by one fused model: models of other dtypes never see it. A buffer is borrowed for one product and given back; two
threads, or a call within a call, borrow two. Buffers are kept from the first product of a step to the end of its
backward pass, and none is kept when the model is idle.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch

from isotype.compat.torch import after_backward, current_backward

# (device, stream, dtype): work queued on one stream runs in order, so its buffers can be used again at once.
_Key = tuple[torch.device, int, torch.dtype]


class Workspace:
    """A pool of flat buffers by device, stream and dtype."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[_Key, list[torch.Tensor]] = defaultdict(list)
        self._ending: int | None = None  # the backward pass at whose end buffers are released

    @contextmanager
    def borrow(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, keep: bool = True
    ) -> Iterator[torch.Tensor]:
        """An uninitialized tensor of `shape` for the time of the `with` block; nothing may refer to it afterwards.

        `keep` says whether the buffer stays for the next product; a forward that no backward follows keeps none.
        """
        key = (device, _stream(device), dtype)
        size = prod(shape)
        buffer = self._take(key, size)
        try:
            yield buffer[:size].view(*shape)
        finally:
            if keep:
                with self._lock:
                    self._free[key].append(buffer)

    def _take(self, key: _Key, size: int) -> torch.Tensor:
        device, _, dtype = key
        with self._lock:
            free = self._free[key]
            fitting = [buffer for buffer in free if buffer.numel() >= size]
            if fitting:
                smallest = min(fitting, key=torch.Tensor.numel)
                self._free[key] = [buffer for buffer in free if buffer is not smallest]
                return smallest
            free.clear()  # too small: one larger buffer takes their place
        with torch.inference_mode(False):  # the next product may be one that is trained
            return torch.empty(size, dtype=dtype, device=device)

    def release(self) -> None:
        """Give every buffer that is not borrowed back to torch."""
        with self._lock:
            self._free.clear()
            self._ending = None

    def release_after_backward(self) -> None:
        """Called in a backward pass: release when it has ended."""
        # One that raised has never ended: it may not keep the next one from being asked.
        if self._ending != (number := current_backward()):
            self._ending = number
            # As DistributedDataParallel and FSDP do; there is no public name for it.
            after_backward(self.release)

    @property
    def held(self) -> int:
        """Bytes of the buffers that nobody has borrowed."""
        with self._lock:
            return sum(b.numel() * b.element_size() for free in self._free.values() for b in free)

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()  # a copy of the model has its own


def _stream(device: torch.device) -> int:
    """The number of the device's current stream; 0 on a device without streams."""
    if device.type in ("cpu", "meta"):
        return 0
    return int(torch.accelerator.current_stream(device).stream_id)
