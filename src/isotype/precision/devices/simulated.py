"""What code that chooses its path by the machine asks of a fake tensor: the CPU that is simulated, which need not be this one.

Fakes are on the CPU whatever device is simulated. Their mode carries what a path depends on.
"""

from __future__ import annotations

import torch

from isotype.compat.torch import FakeTensor, FakeTensorMode
from isotype.precision.devices.profile import DeviceProfile, this_cpu_emulates

VALUE = "_isotype_value"
"""Attribute of a fake tensor whose value a trace knows."""

_LOW = (torch.bfloat16, torch.float16)


class SimulatedMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors of one simulated device.

    Attributes:
        is_cpu: whether it is a CPU; no where none is named.
        emulated: 16-bit dtypes that the simulated CPU has no instructions for; empty for another device.
    """

    def __init__(self, profile: DeviceProfile | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        cpu = profile if profile is not None and profile.kind == "cpu" else None
        self.is_cpu = cpu is not None
        self.emulated = frozenset(
            dtype for dtype in _LOW if cpu is not None and cpu.supports(dtype) != "native"
        )


def simulates_cpu(fake: FakeTensor) -> bool:
    """Return whether the device whose part `fake` takes is a CPU."""
    return isinstance(fake.fake_mode, SimulatedMode) and fake.fake_mode.is_cpu


def is_emulated(fake: FakeTensor, dtype: torch.dtype) -> bool:
    """Return whether the CPU whose part `fake` takes has no instructions for products in `dtype`."""
    return isinstance(fake.fake_mode, SimulatedMode) and dtype in fake.fake_mode.emulated


def working_dtype(compute: torch.dtype, x: torch.Tensor) -> torch.dtype:
    """Return the dtype that products run in: `compute`, or float32 on a CPU that emulates it, many times
    slower.

    A product of 16-bit numbers that is summed in float32 and rounded once is what the slow kernels give, too.
    """
    if x.device.type != "cpu":
        return compute
    slow = is_emulated(x, compute) if isinstance(x, FakeTensor) else this_cpu_emulates(compute)
    return torch.float32 if slow else compute


def has_value(fake: torch.Tensor) -> bool:
    """True if a trace has given the fake tensor its value: if it is small and depends on no weight."""
    return hasattr(fake, VALUE)
