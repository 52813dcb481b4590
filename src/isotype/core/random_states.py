"""The random states of Python, NumPy and torch's CPU, kept as they are; of a device too, where one is named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@contextmanager
def random_states_kept() -> Iterator[None]:
    """What draws within it moves nothing that is drawn afterwards."""
    import numpy

    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states at one moment; to take them waits for no device."""

    python: Any
    arrays: Any
    cpu: torch.Tensor
    device: torch.device
    own: torch.Tensor | None

    @classmethod
    def taken(cls, device: torch.device) -> RandomStates:
        """The states now; of the devices, that of `device`."""
        import numpy

        own = None if device.type in ("cpu", "meta") else _backend(device).get_rng_state(device)
        return cls(random.getstate(), numpy.random.get_state(), torch.get_rng_state(), device, own)

    def put_back(self) -> None:
        """Draw on from here."""
        import numpy

        random.setstate(self.python)
        numpy.random.set_state(self.arrays)
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            _backend(self.device).set_rng_state(self.own, self.device)


def _backend(device: torch.device) -> Any:
    return torch.get_device_module(device)
