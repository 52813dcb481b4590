"""Measures the matmul rate of each dtype on this machine within a time limit.

A call computes two products of a frozen linear layer in a LoRA step: x @ w.T and y @ w. Their rates can differ. On a
CPU with AVX2, bfloat16 ran at 4.2 and at 1.3 GFLOP/s. A dtype without hardware support can be a hundred times slower
than another dtype. Therefore the matrices grow only if the next size certainly fits the time limit. The dtypes take
turns, so that other programs slow down all dtypes equally.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from isotype.core.dtypes import COMPUTE_DTYPES
from isotype.core.errors import PrecisionError, UsageError, first_line
from isotype.precision.devices.profile import DeviceProfile, device_profile

_FIRST_SIDE = 32
# On an accelerator, the launch time is negligible only for large matrices.
_ACCELERATOR_SIZE = 4096
_CPU_SIZE = 1024
# For smaller matrices the overhead of a call would distort the rate.
_LEAST_SIDE = 256
_LEAST_CALLS = 5
_STEADY = 1.5


@dataclass(frozen=True)
class MatmulRate:
    """The measured rate of one dtype.

    Attributes:
        flops_per_second: 4 n^3 divided by the seconds of the fastest call; None if the operator raised an error.
        repeats: number of timed calls at the final size.
        size: side n of the square matrices at the final size.
        message: the operator's error; None if there is a rate.
        spread: median time of a call divided by the fastest time, at the final size; 1 on an idle machine.
    """

    dtype: torch.dtype
    flops_per_second: float | None
    repeats: int
    size: int
    message: str | None = None
    spread: float = 1.0

    @property
    def steady(self) -> bool:
        """True if the rate is reliable: enough calls took similar times, and the matrices were large enough."""
        return self.size >= _LEAST_SIDE and self.repeats >= _LEAST_CALLS and self.spread <= _STEADY


def next_side(side: int, size: int, call_seconds: float, remaining: float, waiting: float = 0.0) -> int:
    """Return the side length of the next matrices: `2 * side`, but at most `size`. Return `side` if a call would take
    too long.

    A call with matrices of `side` took `call_seconds`. Of this time, `waiting` seconds do not depend on the side
    length, and the rest grows with its cube. A call takes too long if it needs more than a quarter of the `remaining`
    seconds.
    """
    larger = min(2 * side, size)
    predicted = waiting + (call_seconds - waiting) * (larger / side) ** 3
    return larger if predicted <= remaining / 4 else side


def require_present(device: str | torch.device) -> DeviceProfile:
    """Return the profile of a device. Raise UsageError if the device is not in this machine."""
    profile = device_profile(device)
    if not profile.present:
        headline, what = f"{profile.title} is not in this machine", f"device {device}"
        raise UsageError.of(headline, what, "a device of this machine", "omit the device")
    return profile


def real_device(device: str | torch.device) -> torch.device:
    """Return a device as a `torch.device`. Raise PrecisionError if it is not in this machine."""
    profile = device_profile(device)
    if not profile.present:
        headline, actual = "only a device of this machine can be measured", f"device {str(device)!r}"
        fix = "use auto, cpu or a device that torch finds on this machine"
        raise PrecisionError.of(headline, actual, "a device of this machine", fix)
    return torch.device(profile.name)


def _operands(side: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = torch.randn(2, side, side)
    return left.to(device, dtype), right.to(device, dtype)


def clock(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds. If torch uses one CPU thread, the clock counts the CPU time of this thread."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def wait_for(device: torch.device) -> None:
    """Wait until an accelerator has finished all queued work."""
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
    """The measurement of one dtype. An error ends the measurement."""

    dtype: torch.dtype
    device: torch.device
    seconds: float
    spent: float = 0.0
    side: int = 0
    times: list[float] = field(default_factory=list)
    message: str | None = None
    operands: tuple[torch.Tensor, torch.Tensor] | None = None

    def grow(self, size: int) -> None:
        """Set `side` to the largest side up to `size` within the time limit, and warm up."""
        self._prepare(min(_FIRST_SIDE, size))
        before = None
        while self.message is None:
            # The faster of two calls: a call that had to wait does not predict the next call's time.
            took = min(self._call(), self._call())
            # On a busy machine, torch's threads wait for each other. This time is the same for small and large products.
            waiting = took if before is None else min(max(0.0, (8 * before - took) / 7), took)
            larger = next_side(self.side, size, took, self.seconds - self.spent, waiting)
            if larger == self.side:
                return
            before = took
            self._prepare(larger)

    def measure(self) -> None:
        """Add the time of another call at the final size."""
        if self.message is None:
            self.times.append(self._call())

    @property
    def done(self) -> bool:
        enough = len(self.times) >= _LEAST_CALLS and self.spent + self.times[-1] > self.seconds
        return self.message is not None or enough

    def rate(self) -> MatmulRate:
        if self.message is not None:
            return MatmulRate(self.dtype, None, 0, self.side, self.message)
        fastest = min(self.times)
        spread = statistics.median(self.times) / fastest
        return MatmulRate(self.dtype, 4 * self.side**3 / fastest, len(self.times), self.side, spread=spread)

    def _prepare(self, side: int) -> None:
        """Make new operands and call the product once, which loads kernels and libraries."""
        self.side, self.operands = side, None
        self._call()

    def _call(self) -> float:
        if self.message is not None:
            return 0.0
        try:
            self.operands = self.operands or _operands(self.side, self.dtype, self.device)
            took = _time_call(self.operands, self.device)
        except (RuntimeError, TypeError) as error:  # torch's errors for a dtype, a device or an allocation
            self.message = first_line(error)
            return 0.0
        self.spent += took
        return took


def measure_all(device: str | torch.device, seconds_total: float) -> dict[torch.dtype, MatmulRate]:
    """Return compute dtype -> measured rate of square matmuls on a device of this machine.

    Args:
        seconds_total: time limit for all dtypes together. A slow dtype gets smaller matrices, and may exceed its share
            of the time by a few calls.

    Raises:
        PrecisionError: the device is not in this machine.
    """
    target = real_device(device)
    largest = _CPU_SIZE if target.type == "cpu" else _ACCELERATOR_SIZE
    probes = [_Probe(dtype, target, seconds_total / len(COMPUTE_DTYPES)) for dtype in COMPUTE_DTYPES]
    with torch.no_grad():
        for probe in probes:
            probe.grow(largest)
        while not all(probe.done for probe in probes):
            for probe in probes:
                if not probe.done:
                    probe.measure()
    return {probe.dtype: probe.rate() for probe in probes}
