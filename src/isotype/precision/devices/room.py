"""The memory of a device that a step may take: the one share that every verdict, plan and choice goes by."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from isotype.core.units import format_bytes, free_memory
from isotype.precision.devices.profile import DeviceProfile

SHARE_OF_GPU = 0.85
"""Of a GPU's memory: the allocator's rounding and gaps, kernels' workspaces and the driver's context come on top of a step's tensors."""

SHARE_OF_CPU = 0.5
"""Of a CPU's memory: the libraries, the data and other programs take from the same, and the heap has gaps."""


@dataclass(frozen=True)
class Room:
    """Memory that a step may take.

    Attributes:
        size: bytes; None if they are not known.
        words: what it is a part of, or why it is not known.
    """

    size: int | None
    words: str

    def __str__(self) -> str:
        """`20.0 GiB (85 % of NVIDIA GeForce RTX 4090's 23.5 GiB)`."""
        return self.words if self.size is None else f"{format_bytes(self.size)} ({self.words})"

    def holds(self, peak: int) -> bool:
        """Return a step with this peak in bytes fits; also if the room is not known."""
        return self.size is None or peak <= self.size


def room_of(profile: DeviceProfile, *, all_free: bool = False) -> Room:
    """Return the share of a device's memory that a step may take: of one that is in this machine, of what is
    free now.

    Processes that a launcher has started on a machine share its CPU's memory.

    Args:
        profile: the device.
        all_free: whether what is taken now counts as free: of a step whose model is there already.
    """
    is_cpu, total = profile.kind == "cpu", profile.memory_bytes
    share, part = (
        (SHARE_OF_CPU, "half") if is_cpu else (SHARE_OF_GPU, f"{SHARE_OF_GPU:.0%}".replace("%", " %"))
    )
    free = free_memory(torch.device(profile.name)) if profile.present and not all_free else None
    if free is not None and is_cpu:
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return Room(int(share * free), f"{part} of the {format_bytes(free)} that are free")
    if not total:
        return Room(None, f"the memory of {profile.title} is not known")
    if free is not None and free < total:
        return Room(int(share * free), f"{part} of the {format_bytes(free)} free on {profile.title}")
    return Room(int(share * total), f"{part} of {profile.title}'s {format_bytes(total)}")
