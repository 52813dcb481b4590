"""Rates of the device at hand, measured: no data sheet has those of this CPU, and no card reaches its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from isotype.precision.devices.probe import clock, measure_all
from isotype.precision.devices.profile import DeviceProfile

_SECONDS = 1.0
"""Of the products of all dtypes."""
_MOST_BYTES = 64 * 2**20
"""Of what is copied: past the caches of most CPUs, and of GPUs."""
_TRIES = 5
_DRAWN = 1 << 21
_PART = 0.9
_ELEMENT = 4


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
    source = torch.zeros(_MOST_BYTES // _ELEMENT, device=device)
    target = torch.empty_like(source)
    return 2 * _MOST_BYTES / _fastest(lambda: target.copy_(source), device)


def draw_rate(device: torch.device) -> float:
    """Random values a second of a dropout's mask, the best of a few: a CPU draws them one after another, in one thread."""
    mask = torch.empty(_DRAWN, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(0)  # the process's own stays as it is
    return _DRAWN / _fastest(lambda: mask.bernoulli_(_PART, generator=generator), device)


def page_rate(device: torch.device) -> float | None:
    """Bytes a second in which the system hands out cleared pages: a new block's first writing beside its second. None on other devices
    than a CPU, whose allocators keep what is freed, and where a new block is written as fast as an old one.
    """
    if device.type != "cpu":
        return None
    block = torch.zeros(_MOST_BYTES, dtype=torch.uint8)
    new = _fastest(lambda: torch.empty(_MOST_BYTES, dtype=torch.uint8).fill_(1), device)
    again = _fastest(lambda: block.fill_(1), device)
    return _MOST_BYTES / (new - again) if new > again else None


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds."""
    took, seconds = [], clock(device)
    for _ in range(_TRIES):
        _wait(device)
        began = seconds()
        run()
        _wait(device)
        took.append(seconds() - began)
    return min(took)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
