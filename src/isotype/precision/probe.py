"""How fast matmuls of each dtype really run on this machine, within a time budget.

A dtype without hardware support can be a hundred times slower than its neighbour, so nothing here assumes a rate:
the matrix grows only while the next size is sure to fit the budget.

One call is what a frozen linear layer runs in a LoRA step: the forward x @ w.T and the input gradient y @ w. Both
count, because without hardware support the layout alone changes the rate: bfloat16 on an AVX2 CPU ran the first at
4.2 GFLOP/s and the second at 1.3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from isotype.dtypes import COMPUTE_DTYPES
from isotype.errors import PrecisionError, Problem
from isotype.precision.hardware import device_profile

_FIRST_SIDE = 64
_SYNCHRONIZE: dict[str, Callable[[], None]] = {
    "cuda": torch.cuda.synchronize,
    "xpu": torch.xpu.synchronize,
    "mps": torch.mps.synchronize,
}
# Accelerators need a large matrix before the launch of a kernel stops counting.
_ACCELERATOR_SIZE = 4096
_CPU_SIZE = 512


@dataclass(frozen=True)
class MatmulRate:
    """What one dtype reached.

    Attributes:
        dtype: of both operands and the result.
        flops_per_second: 4 n^3 over the seconds of the fastest call; None when the operator refused the dtype.
        seconds_spent: wall time of the whole measurement, first calls included.
        repeats: timed calls at the final size.
        size: side n of the square matrices of those calls.
        message: why there is no rate, in the operator's own words; None when there is one.
    """

    dtype: torch.dtype
    flops_per_second: float | None
    seconds_spent: float
    repeats: int
    size: int
    message: str | None = None


def next_side(side: int, size: int, call_seconds: float, remaining: float) -> int:
    """The next side to try after one call at `side` took `call_seconds`: twice as large, or the same to stop.

    A call costs n^3; a doubled one is allowed a quarter of what remains, so that caches that overflow (which
    make it cost more than 8 times as much) still leave it inside the budget.
    """
    larger = min(2 * side, size)
    predicted = call_seconds * (larger / side) ** 3
    return larger if predicted <= remaining / 4 else side


def _real_device(device: str | torch.device) -> torch.device:
    """The torch device of `device`, which must be in this machine."""
    profile = device_profile(device)
    if not profile.present:
        given, expected = f"device {str(device)!r}", "a device of this machine"
        fix = "give auto, cpu or a device that torch sees here"
        raise PrecisionError("only a device that is here can be measured", [Problem(given, expected, fix)])
    return torch.device(profile.name)


def _operands(side: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = torch.randn(2, side, side)
    return left.to(device, dtype), right.to(device, dtype)


def _time_call(operands: tuple[torch.Tensor, torch.Tensor], synchronize: Callable[[], None]) -> float:
    synchronize()
    start = time.perf_counter()
    inputs, weight = operands
    torch.mm(torch.mm(inputs, weight.t()), weight)
    synchronize()
    return time.perf_counter() - start


def measure_matmul(
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    seconds: float = 0.25,
    size: int = _CPU_SIZE,
) -> MatmulRate:
    """Measure square matmuls in `dtype` on a real device.

    Args:
        dtype: of the operands.
        device: a device of torch in this machine.
        seconds: time budget; exceeded by one call at most.
        size: largest side of the square matrices; a slow dtype is measured on a smaller one.

    Returns:
        The rate; `flops_per_second` is None, with the operator's message, where the dtype is refused.

    Raises:
        PrecisionError: the device is not in this machine.
    """
    target = _real_device(device)
    synchronize = _SYNCHRONIZE.get(target.type, lambda: None)
    start = time.perf_counter()
    side, times = min(_FIRST_SIDE, size), list[float]()

    def remaining() -> float:
        return seconds - (time.perf_counter() - start)

    try:
        with torch.no_grad():
            operands = _operands(side, dtype, target)
            _time_call(operands, synchronize)  # the first call loads kernels and libraries
            times = [_time_call(operands, synchronize)]
            while (larger := next_side(side, size, times[-1], remaining())) > side:
                side, operands = larger, _operands(larger, dtype, target)
                times = [_time_call(operands, synchronize)]
            while remaining() > times[-1]:
                times.append(_time_call(operands, synchronize))
    except (RuntimeError, TypeError) as error:  # how torch refuses a dtype, a device or an allocation
        message = str(error).partition("\n")[0]
        return MatmulRate(dtype, None, time.perf_counter() - start, 0, side, message)
    return MatmulRate(dtype, 4 * side**3 / min(times), time.perf_counter() - start, len(times), side)


def measure_all(
    device: str | torch.device = "cpu",
    seconds_total: float = 1.0,
    dtypes: Sequence[torch.dtype] = COMPUTE_DTYPES,
) -> dict[torch.dtype, MatmulRate]:
    """Measure every compute dtype, sharing the budget of `seconds_total` seconds equally."""
    target = _real_device(device)
    size = _CPU_SIZE if target.type == "cpu" else _ACCELERATOR_SIZE
    share = seconds_total / len(dtypes)
    return {dtype: measure_matmul(dtype, target, share, size) for dtype in dtypes}
