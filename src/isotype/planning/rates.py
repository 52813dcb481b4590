"""Rates for time estimates. They are measured on a device of this machine, or are a share of the data sheet's rates
(`REACHED`).

`benchmarks/rates.py` fits these shares to published runs, and tests them on other runs (table in docs/plan.md).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from isotype.precision.devices.probe import clock, measure_all, wait_for
from isotype.precision.devices.profile import DeviceProfile, StepRates

_SECONDS = 1.0


class _Load(NamedTuple):
    """Sizes of timed operations: bytes of a copy (too large for all caches), random values, and calls per synchronization."""

    copied: int
    drawn: int
    queued: int


_CPU = _Load(copied=64 << 20, drawn=1 << 21, queued=1)
_GPU = _Load(copied=256 << 20, drawn=1 << 25, queued=8)
"""A GPU copies 256 MiB, which is the size of the largest last-level cache of a GPU (MI300X)."""
_TRIES = 5
_PART = 0.9
_ELEMENT = 4


def _load(device: torch.device) -> _Load:
    return _CPU if device.type == "cpu" else _GPU


@dataclass(frozen=True)
class Reached(StepRates):
    """Shares of a GPU's data-sheet rates that trainings reach. All numbers were fitted.

    Attributes:
        products: share of the peak rate that matrix products reach on a GPU with a peak of 100 TFLOP/s.
        falling: exponent by which the share decreases on faster GPUs: `products` * (100 TFLOP/s / peak rate) ** `falling`.
        ceiling: the largest share. GeForce GPUs and A10G reach this share. Their 16-bit products that accumulate in float32 run
            at half the rate, which is at most twice the rate of float32 products.
    """

    products: float
    falling: float
    ceiling: float

    def rates(self, peaks: Mapping[torch.dtype, float]) -> dict[torch.dtype, float]:
        """Return the FLOP/s that matrix products reach, by dtype. The argument `peaks` contains the FLOP/s of the data sheet."""
        halved = 2.02 * peaks.get(torch.float32, 0.0)
        falls = {dtype: self.products * (1e14 / peak) ** self.falling for dtype, peak in peaks.items()}
        return {
            dtype: peak * (self.ceiling if peak <= halved else min(self.ceiling, falls[dtype]))
            for dtype, peak in peaks.items()
        }


REACHED = Reached(products=0.7, falling=0.083, ceiling=0.97, launch=15e-6, spread=1.25)


def with_rates(profile: DeviceProfile, reached: Reached = REACHED) -> tuple[DeviceProfile, str]:
    """Return the profile with rates for time estimates, and a description of the source of the rates ("" without
    rates).

    A device of this machine is measured in about a second. For other devices, the rates are the shares that published
    runs reach.
    """
    steps = None if profile.kind == "cpu" else reached
    if profile.present:
        measured, steady = _measured(profile)
        busy = "" if steady else ", while it was busy: times are uncertain"
        return replace(measured, steps=steps), f"rates measured on this machine{busy}"
    if not profile.peak_flops or profile.memory_bandwidth is None:
        return profile, ""
    rates = reached.rates(profile.peak_flops)
    return replace(profile, peak_flops=rates, steps=steps), "speed estimated from published runs on GPUs"


def _measured(profile: DeviceProfile) -> tuple[DeviceProfile, bool]:
    """Return the profile with measured rates, and True if the rates of matrix products are reliable."""
    device = torch.device(profile.name)
    rates = measure_all(profile.name, _SECONDS)
    steady = all(rate.steady for rate in rates.values() if rate.message is None)
    rated = replace(
        profile,
        peak_flops={dtype: rate.flops_per_second for dtype, rate in rates.items() if rate.flops_per_second},
        memory_bandwidth=copy_rate(device),
        random_rate=draw_rate(device),
        page_rate=page_rate(device),
    )
    return rated, steady


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes, in the fastest of several tries."""
    size = _load(device).copied
    source = torch.zeros(size // _ELEMENT, device=device)
    target = torch.empty_like(source)
    return 2 * size / _fastest(lambda: target.copy_(source), device)


def draw_rate(device: torch.device) -> float:
    """Return the random values per second of a dropout mask in the fastest of several tries. A CPU uses one thread."""
    count = _load(device).drawn
    mask = torch.empty(count, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(0)  # torch's global generator stays unchanged
    return count / _fastest(lambda: mask.bernoulli_(_PART, generator=generator), device)


def page_rate(device: torch.device) -> float | None:
    """Return the bytes of zeroed pages that the operating system provides to a CPU per second; None on other devices.

    A CPU waits for these pages at the first write to a new memory block. The allocators of other devices keep freed
    blocks.
    """
    if device.type != "cpu":
        return None
    size = _CPU.copied
    block = torch.zeros(size, dtype=torch.uint8)
    new = _fastest(lambda: torch.empty(size, dtype=torch.uint8).fill_(1), device)
    again = _fastest(lambda: block.fill_(1), device)
    return size / (new - again) if new > again else None


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    times, seconds, queued = [], clock(device), _load(device).queued
    for _ in range(_TRIES):
        wait_for(device)
        began = seconds()
        for _ in range(queued):
            run()
        wait_for(device)
        times.append((seconds() - began) / queued)
    return min(times)
