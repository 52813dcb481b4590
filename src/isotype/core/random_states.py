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
def random_states_kept(device: torch.device | None = None) -> Iterator[None]:
    """What draws within it moves nothing that is drawn afterwards: by Python, NumPy or torch, on the CPU and on devices in use.

    Imports draw as well. A library that is not loaded yet has no state that anybody has set. Other than `torch.random.fork_rng()`
    this starts no device: of a GPU that this process leaves to others nothing is asked, and no context of theirs is made.

    Args:
        device: one that is about to be used, and may be started for it; None where only those that are in use matter.
    """
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            import numpy

            stack.callback(numpy.random.set_state, numpy.random.get_state())
        if "torch" in sys.modules:
            import torch

            stack.callback(torch.set_rng_state, torch.get_rng_state())
            for each in _in_use(device):
                stack.callback(_backend(each).set_rng_state, _backend(each).get_rng_state(each), each)
        yield


def _in_use(device: torch.device | None) -> list[torch.device]:
    """Accelerators whose state may have been set: `device`, and all of a kind that is running already."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    # To ask a device that nobody uses for its state would start it; of a kind that runs, states lie in the CPU's memory.
    if kind is None or not getattr(_backend(kind), "is_initialized", lambda: True)():
        return [] if device is None or device.type in ("cpu", "meta") else [device]
    return [torch.device(kind.type, number) for number in range(torch.accelerator.device_count())]


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
