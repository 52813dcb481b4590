"""How fast matmuls of each dtype really run on this machine, within a time budget.

A dtype without hardware support can be a hundred times slower than its neighbour, so nothing here assumes a rate:
the matrix grows only while the next size is sure to fit the budget. What is compared is measured alike: after a
warm-up, several calls of each dtype, which take turns, so that a machine that is busy for a while slows them all.
Where the calls of one dtype differ much all the same, its rate is no basis for advice (`MatmulRate.steady`).

One call is what a frozen linear layer runs in a LoRA step: the forward x @ w.T and the input gradient y @ w. Both
count, because without hardware support the layout alone changes the rate: bfloat16 on an AVX2 CPU ran the first at
4.2 GFLOP/s and the second at 1.3.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from isotype.core.dtypes import COMPUTE_DTYPES
from isotype.core.errors import PrecisionError, first_line
from isotype.precision.devices.profile import device_profile

_FIRST_SIDE = 64
# Accelerators need a large matrix before the launch of a kernel stops counting.
_ACCELERATOR_SIZE = 4096
_CPU_SIZE = 1024
# Below, starting a call takes a share of its time that a training's matrices do not know.
_LEAST_SIDE = 256
_LEAST_CALLS = 5
_STEADY = 1.5


@dataclass(frozen=True)
class MatmulRate:
    """What one dtype reached.

    Attributes:
        dtype: of both operands and the result.
        flops_per_second: 4 n^3 over the seconds of the fastest call; None when the operator refused the dtype.
        repeats: timed calls at the final size.
        size: side n of the square matrices of those calls.
        message: why there is no rate, in the operator's own words; None when there is one.
        spread: the median of those calls over the fastest; 1 on a machine that does nothing else.
    """

    dtype: torch.dtype
    flops_per_second: float | None
    repeats: int
    size: int
    message: str | None = None
    spread: float = 1.0

    @property
    def steady(self) -> bool:
        """True if the rate can be compared with another: of matrices large enough, in calls that took alike long."""
        return self.size >= _LEAST_SIDE and self.repeats >= _LEAST_CALLS and self.spread <= _STEADY


def next_side(side: int, size: int, call_seconds: float, remaining: float) -> int:
    """Return the next side to try after one call at `side` took `call_seconds`: twice as large, or the same
    to stop.

    A call costs n^3; a doubled one is allowed a quarter of what remains, so that caches that overflow (which
    make it cost more than 8 times as much) still leave it inside the budget.
    """
    larger = min(2 * side, size)
    predicted = call_seconds * (larger / side) ** 3
    return larger if predicted <= remaining / 4 else side


def real_device(device: str | torch.device) -> torch.device:
    """Return the torch device of `device`.

    Raises:
        PrecisionError: it is not in this machine.
    """
    profile = device_profile(device)
    if not profile.present:
        given, expected = f"device {str(device)!r}", "a device of this machine"
        fix = "give auto, cpu or a device that torch sees here"
        raise PrecisionError.of("only a device that is here can be measured", given, expected, fix)
    return torch.device(profile.name)


def _operands(side: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = torch.randn(2, side, side)
    return left.to(device, dtype), right.to(device, dtype)


def clock(device: torch.device) -> Callable[[], float]:
    """What to measure seconds by: of a CPU in one thread its own, which other processes do not lengthen."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def wait_for(device: torch.device) -> None:
    """Wait for a device's work: that of this one, whichever of several is the current one."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _time_call(operands: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> float:
    seconds = clock(device)
    wait_for(device)
    start = seconds()
    inputs, weight = operands
    torch.mm(torch.mm(inputs, weight.t()), weight)
    wait_for(device)
    return seconds() - start


@dataclass
class _Probe:
    """The calls of one dtype. `times` are those at the final size; a refusal ends it."""

    dtype: torch.dtype
    device: torch.device
    seconds: float
    spent: float = 0.0
    side: int = 0
    times: list[float] = field(default_factory=list)
    message: str | None = None
    operands: tuple[torch.Tensor, torch.Tensor] | None = None

    def grow(self, size: int) -> None:
        """Find the largest side that the budget allows, up to `size`, and warm up there."""
        self._prepare(min(_FIRST_SIDE, size))
        while self.message is None:
            # The better of two: one call that had to wait says nothing of the next size.
            took = min(self._call(), self._call())
            larger = next_side(self.side, size, took, self.seconds - self.spent)
            if larger == self.side:
                return
            self._prepare(larger)

    def measure(self) -> None:
        """One more call at the final size."""
        if self.message is None:
            self.times.append(self._call())

    @property
    def done(self) -> bool:
        """True if the budget is spent, on calls enough to compare."""
        enough = len(self.times) >= _LEAST_CALLS and self.spent + self.times[-1] > self.seconds
        return self.message is not None or enough

    def rate(self) -> MatmulRate:
        """What was reached."""
        if self.message is not None:
            return MatmulRate(self.dtype, None, 0, self.side, self.message)
        fastest = min(self.times)
        spread = statistics.median(self.times) / fastest
        return MatmulRate(self.dtype, 4 * self.side**3 / fastest, len(self.times), self.side, spread=spread)

    def _prepare(self, side: int) -> None:
        """New operands, and a first call, which loads kernels and libraries."""
        self.side = side
        try:
            self.operands = _operands(side, self.dtype, self.device)
        except (RuntimeError, TypeError) as error:  # how torch refuses a dtype, a device or an allocation
            self.message = first_line(error)
            return
        self._call()

    def _call(self) -> float:
        if self.operands is None or self.message is not None:
            return 0.0
        try:
            took = _time_call(self.operands, self.device)
        except (RuntimeError, TypeError) as error:  # as above
            self.message = first_line(error)
            return 0.0
        self.spent += took
        return took


def measure_all(
    device: str | torch.device = "cpu",
    seconds_total: float = 1.0,
    dtypes: Sequence[torch.dtype] = COMPUTE_DTYPES,
    size: int | None = None,
) -> dict[torch.dtype, MatmulRate]:
    """Measure square matmuls in each dtype on a real device.

    Args:
        device: a device of torch in this machine.
        seconds_total: time budget of all, shared equally; exceeded by a few calls of a slow dtype.
        dtypes: of the operands.
        size: largest side of the square matrices; a slow dtype is measured on a smaller one.

    Returns:
        The rates; `flops_per_second` is None, with the operator's message, where a dtype is refused.

    Raises:
        PrecisionError: the device is not in this machine.
    """
    target = real_device(device)
    largest = size or (_CPU_SIZE if target.type == "cpu" else _ACCELERATOR_SIZE)
    probes = [_Probe(dtype, target, seconds_total / len(dtypes)) for dtype in dtypes]
    with torch.no_grad():
        for probe in probes:
            probe.grow(largest)
        while not all(probe.done for probe in probes):
            for probe in probes:
                if not probe.done:
                    probe.measure()
    return {probe.dtype: probe.rate() for probe in probes}
