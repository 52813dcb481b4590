"""The memory of a device that a training step may use."""

import os
from dataclasses import dataclass

import torch

from isotype.core.names import format_bytes, free_memory
from isotype.precision.devices.profile import DeviceProfile

SHARE_OF_GPU = 0.85
"""Share of a GPU's memory that a step may use. The rest is for the driver, workspaces of kernels, and fragmentation of the allocator."""

SHARE_OF_CPU = 0.5
"""Share of a CPU's memory that a step may use. The rest is for libraries, data, other programs, and fragmentation of the heap."""


@dataclass(frozen=True)
class Room:
    """The memory that a step may use.

    Attributes:
        size: bytes of the device's memory that a step may use; None if unknown.
        words: a description of the origin of `size`, such as a share of the device's memory, or the reason why it is unknown.
    """

    size: int | None
    words: str

    def __str__(self) -> str:
        """Describe the room: `20.0 GiB (85 % of NVIDIA GeForce RTX 4090's 23.5 GiB)`."""
        return self.words if self.size is None else f"{format_bytes(self.size)} ({self.words})"

    def holds(self, peak: int) -> bool:
        """Return True if a step with a memory peak of this many bytes fits, or if the room is unknown."""
        return self.size is None or peak <= self.size


def room_of(profile: DeviceProfile, *, all_free: bool = False) -> Room:
    """Return the memory available to a step.

    For a device in this machine, the room is a share of the free memory. For other devices, it is a share of the
    total memory. All processes that a launcher has started on a machine share its CPU memory equally. `all_free`
    counts used memory as free. It is used if the model is already on the device.
    """
    is_cpu, total = profile.kind == "cpu", profile.memory_bytes
    share, part = (SHARE_OF_CPU, "half") if is_cpu else (SHARE_OF_GPU, f"{100 * SHARE_OF_GPU:.0f} %")
    free = free_memory(torch.device(profile.name)) if profile.present and not all_free else None
    if free is not None and is_cpu:
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return Room(int(share * free), f"{part} of the {format_bytes(free)} that are free")
    if not total:
        return Room(None, f"the memory of {profile.title} is not known")
    if free is not None and free < total:
        return Room(int(share * free), f"{part} of the {format_bytes(free)} free on {profile.title}")
    return Room(int(share * total), f"{part} of {profile.title}'s {format_bytes(total)}")
