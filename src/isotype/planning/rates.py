"""Rates to foresee time by: measured on the device at hand; of another card, those of its data sheet that published runs reached.

What they reached is a model of five numbers (`REACHED`), fitted to some published runs and tried on the others by `benchmarks/rates.py`
(docs/plan.md has the table). A product reaches a share of the peak rate, a smaller one on a larger card, whose many units its caches
feed less well. Operators between products are fused, here and there: of the bytes and the launches that a trace has of them,
one operator after another, a share is left. Other traffic runs at the memory's bandwidth. A launch takes the host some microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from isotype.precision.devices.probe import clock, measure_all, wait_for
from isotype.precision.devices.profile import DeviceProfile, StepRates

_SECONDS = 1.0
"""Of the products of all dtypes."""


class _Load(NamedTuple):
    """What is timed on a kind of device: bytes that are copied, past the caches; random values that are drawn; calls that the device is
    waited for once, since beside a GPU's kernels it takes its time to launch and wait for one.
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


@dataclass(frozen=True)
class Reached(StepRates):
    """What trainings reach of a GPU's data sheet. What is left between products is counted (docs/performance.md), the rest fitted.

    Attributes:
        products: the share of the peak rate that products reach where it is 100 TFLOP/s.
        falling: the power of the peak rate that this share falls with.
        ceiling: the most of it that they reach anywhere, and on cards whose 16-bit products are no more than twice as fast as their float32: such
            a card (GeForce, A10G) sums in float32 at half its units' rate, and feeds them well.
    """

    products: float
    falling: float
    ceiling: float

    def rates(self, peaks: Mapping[torch.dtype, float]) -> dict[torch.dtype, float]:
        """FLOP/s of products by dtype, of peak rates in FLOP/s."""
        halved = 2.02 * peaks.get(torch.float32, 0.0)
        falls = {dtype: self.products * (1e14 / peak) ** self.falling for dtype, peak in peaks.items()}
        return {
            dtype: peak * (self.ceiling if peak <= halved else min(self.ceiling, falls[dtype]))
            for dtype, peak in peaks.items()
        }


REACHED = Reached(products=0.7, falling=0.17, ceiling=0.88, between=0.1, launch=14e-6, spread=1.25)


def with_rates(profile: DeviceProfile, reached: Reached = REACHED) -> tuple[DeviceProfile, str]:
    """(the profile with rates to foresee time by, where they come from as a clause; "" where there are none).

    Of a device of this machine they are measured in about a second; of another one they are what published runs reached of its data sheet's.
    """
    steps = None if profile.kind == "cpu" else reached
    if profile.present:
        return replace(_measured(profile), steps=steps), "rates measured on this machine"
    if not profile.peak_flops or profile.memory_bandwidth is None:
        return profile, ""
    rates = reached.rates(profile.peak_flops)
    return replace(profile, peak_flops=rates, steps=steps), "speed as published runs on GPUs reached it"


def _measured(profile: DeviceProfile) -> DeviceProfile:
    device = torch.device(profile.name)
    rates = measure_all(profile.name, _SECONDS)
    return replace(
        profile,
        peak_flops={
            dtype: rate.flops_per_second for dtype, rate in rates.items() if rate.flops_per_second is not None
        },
        memory_bandwidth=copy_rate(device),
        random_rate=draw_rate(device),
        page_rate=page_rate(device),
    )


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
