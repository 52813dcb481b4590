"""The random states of Python, NumPy and torch's CPU, kept as they are; of a device too, where one is named."""

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
    """The states at one moment, as calls that set them; to take them waits for no device."""

    setters: tuple[Callable[[], object], ...]

    @classmethod
    def taken(cls, *devices: torch.device) -> RandomStates:
        """The states now, of the libraries that are loaded; of accelerators, those of `devices`."""
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

    def put_back(self) -> None:
        """Draw on from here."""
        for each in self.setters:
            each()


@contextmanager
def random_states_kept(device: torch.device | None = None) -> Iterator[None]:
    """What draws within it moves nothing that is drawn afterwards: by Python, NumPy or torch, on the CPU and on devices in use.

    Imports draw as well. A library that is not loaded yet has no state that anybody has set. Other than `torch.random.fork_rng()`
    this starts no device: of a GPU that this process leaves to others nothing is asked, and no context of theirs is made.

    Args:
        device: one that is about to be used, and may be started for it; None where only those that are in use matter.
    """
    states = RandomStates.taken(*(_in_use(device) if "torch" in sys.modules else ()))
    try:
        yield
    finally:
        states.put_back()


def _in_use(device: torch.device | None) -> list[torch.device]:
    """Accelerators whose state may have been set: `device`, and all of a kind that is running already."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    # To ask a device that nobody uses for its state would start it; of a kind that runs, states lie in the CPU's memory.
    if kind is None or not getattr(_backend(kind), "is_initialized", lambda: True)():
        return [] if device is None else [device]
    return [torch.device(kind.type, number) for number in range(torch.accelerator.device_count())]


def _backend(device: torch.device) -> Any:
    import torch

    return torch.get_device_module(device)
