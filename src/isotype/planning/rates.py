"""Rates of the device at hand, measured: no data sheet has those of this CPU, and no card reaches its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from isotype.precision.devices.probe import clock, measure_all, wait_for
from isotype.precision.devices.profile import DeviceProfile

_SECONDS = 1.0
"""Of the products of all dtypes."""


@dataclass(frozen=True)
class _Load:
    """What is timed on a kind of device.

    Attributes:
        copied: bytes, past the caches.
        drawn: random values.
        queued: calls that the device is waited for once: beside a GPU's kernels, to launch and wait for one takes its time.
    """

    copied: int
    drawn: int
    queued: int


_CPU = _Load(copied=64 << 20, drawn=1 << 21, queued=1)
_GPU = _Load(copied=256 << 20, drawn=1 << 25, queued=8)
"""The last cache of an MI300X has 256 MiB, an RTX 4090's 72."""
_TRIES = 5
_PART = 0.9
_ELEMENT = 4


def _load(device: torch.device) -> _Load:
    return _CPU if device.type == "cpu" else _GPU


def with_rates(profile: DeviceProfile) -> tuple[DeviceProfile, str]:
    """(the profile with rates to foresee time by, where they come from as a clause; "" where there are none).

    Of a device of this machine they are measured in about a second; of another one its data sheet's are taken.
    """
    if not profile.present:
        rated = bool(profile.peak_flops) and profile.memory_bandwidth is not None
        return profile, "the data sheet's rates, which no card reaches" if rated else ""
    rates = measure_all(profile.name, _SECONDS)
    peaks = {
        dtype: rate.flops_per_second for dtype, rate in rates.items() if rate.flops_per_second is not None
    }
    device = torch.device(profile.name)
    measured = replace(
        profile,
        peak_flops=peaks,
        memory_bandwidth=copy_rate(device),
        random_rate=draw_rate(device),
        page_rate=page_rate(device),
    )
    return measured, "rates measured on this machine"


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes, the best of a few."""
    size = _load(device).copied
    source = torch.zeros(size // _ELEMENT, device=device)
    target = torch.empty_like(source)
    return 2 * size / _fastest(lambda: target.copy_(source), device)


def draw_rate(device: torch.device) -> float:
    """Random values a second of a dropout's mask, the best of a few: a CPU draws them one after another, in one thread."""
    count = _load(device).drawn
    mask = torch.empty(count, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(0)  # the process's own stays as it is
    return count / _fastest(lambda: mask.bernoulli_(_PART, generator=generator), device)


def page_rate(device: torch.device) -> float | None:
    """Bytes a second in which the system hands out cleared pages: a new block's first writing beside its second. None on other devices
    than a CPU, whose allocators keep what is freed, and where a new block is written as fast as an old one.
    """
    if device.type != "cpu":
        return None
    size = _CPU.copied
    block = torch.zeros(size, dtype=torch.uint8)
    new = _fastest(lambda: torch.empty(size, dtype=torch.uint8).fill_(1), device)
    again = _fastest(lambda: block.fill_(1), device)
    return size / (new - again) if new > again else None


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run."""
    took, seconds, queued = [], clock(device), _load(device).queued
    for _ in range(_TRIES):
        wait_for(device)
        began = seconds()
        for _ in range(queued):
            run()
        wait_for(device)
        took.append((seconds() - began) / queued)
    return min(took)
