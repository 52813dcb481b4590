"""The random states of Python, NumPy and torch's CPU, kept as they are; of a device too, where one is named."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def random_states_kept() -> Iterator[None]:
    """What draws within it moves nothing that is drawn afterwards: by Python, NumPy or torch, on the CPU and on a device in use.

    Imports draw as well. A library that is not loaded yet has no state that anybody has set.
    """
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            import numpy

            stack.callback(numpy.random.set_state, numpy.random.get_state())
        if "torch" in sys.modules:
            import torch

            stack.callback(torch.set_rng_state, torch.get_rng_state())
            kind = torch.accelerator.current_accelerator(check_available=True)
            # To ask a device that nobody uses for its state would start it.
            if kind is not None and getattr(_backend(kind), "is_initialized", lambda: True)():
                for number in range(torch.accelerator.device_count()):
                    state = _backend(kind).get_rng_state(number)
                    stack.callback(_backend(kind).set_rng_state, state, number)
        yield


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
        import torch

        own = None if device.type in ("cpu", "meta") else _backend(device).get_rng_state(device)
        return cls(random.getstate(), numpy.random.get_state(), torch.get_rng_state(), device, own)

    def put_back(self) -> None:
        """Draw on from here."""
        import numpy
        import torch

        random.setstate(self.python)
        numpy.random.set_state(self.arrays)
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            _backend(self.device).set_rng_state(self.own, self.device)


def _backend(device: torch.device) -> Any:
    import torch

    return torch.get_device_module(device)
