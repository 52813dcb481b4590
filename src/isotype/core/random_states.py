"""Save and restore the random states of Python, NumPy and torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RandomStates:
    """Random states of Python, NumPy and torch, saved together. Saving them does not synchronize with a device."""

    setters: tuple[Callable[[], object], ...]

    @classmethod
    def current(cls, *devices: torch.device) -> RandomStates:
        """Return the current random states of Python and `devices`, and of NumPy and torch if they are imported."""
        setters = [partial(random.setstate, random.getstate())]
        if "numpy" in sys.modules:
            import numpy

            setters.append(partial(numpy.random.set_state, numpy.random.get_state()))
        if "torch" in sys.modules:
            import torch

            setters.append(partial(torch.set_rng_state, torch.get_rng_state()))
            for device in devices:
                if device.type not in ("cpu", "meta"):
                    backend = _backend(device)
                    setters.append(partial(backend.set_rng_state, backend.get_rng_state(device), device))
        return cls(tuple(setters))

    def restore(self) -> None:
        for restore in self.setters:
            restore()


@contextmanager
def random_states_kept(device: torch.device | None = None) -> Iterator[None]:
    """At the end of the `with` block, restore the random states of Python, NumPy and torch (CPU and devices in use).

    Unlike `torch.random.fork_rng()`, this creates no CUDA context on a GPU that the process does not use. `device` is
    an accelerator that the code in the `with` block uses.
    """
    states = RandomStates.current(*(_in_use(device) if "torch" in sys.modules else ()))
    try:
        yield
    finally:
        states.restore()


def _in_use(device: torch.device | None) -> list[torch.device]:
    """Return all accelerators if torch has initialized an accelerator; else only `device`."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    # Reading the state of an unused device would initialize it.
    if kind is None or not getattr(_backend(kind), "is_initialized", lambda: True)():
        return [] if device is None else [device]
    return [torch.device(kind.type, number) for number in range(torch.accelerator.device_count())]


def _backend(device: torch.device) -> Any:
    import torch

    return torch.get_device_module(device)
