"""What code that chooses its path by the machine asks of a fake tensor: the CPU that is simulated, which need not be this one.

Fakes are on the CPU whatever device is simulated. Their mode carries what a path depends on.
"""

from __future__ import annotations

import torch

from isotype.compat.torch import FakeTensor, FakeTensorMode
from isotype.precision.devices.profile import DeviceProfile

_LOW = (torch.bfloat16, torch.float16)


class SimulatedMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors of one simulated device.

    Attributes:
        emulated: 16-bit dtypes that the simulated CPU has no instructions for; empty for another device, or where none is named.
    """

    def __init__(self, profile: DeviceProfile | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        cpu = profile is not None and profile.kind == "cpu"
        self.emulated = frozenset(dtype for dtype in _LOW if cpu and profile.supports(dtype) != "native")  # type: ignore[union-attr]


def is_emulated(fake: FakeTensor, dtype: torch.dtype) -> bool:
    """Whether the CPU whose part `fake` takes has no instructions for products in `dtype`."""
    return isinstance(fake.fake_mode, SimulatedMode) and dtype in fake.fake_mode.emulated
