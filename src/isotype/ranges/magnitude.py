"""Magnitudes of tensors, cached on the tensor until it is written to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from isotype.compat.torch import version_of
from isotype.precision.policy import DEFAULT_LOSS_SCALE
from isotype.precision.ranges import FLOAT16_FLUSHED

_SCALED = FLOAT16_FLUSHED / DEFAULT_LOSS_SCALE
_KNOWN = "_isotype_magnitude"
FILL = 1e38
"""Larger values are fill values, infinity or the largest float32 or bfloat16, unless an operator produced them."""


_SAMPLE = 1 << 15
"""Sample size: shares are accurate to a fraction of a percent, and torch uses one thread."""

_SHARED_OUT = 1 << 22


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The largest magnitude of a tensor, without fill values such as attention masks have; `filled` if there
    are some.
    """

    value: float
    filled: bool = False


def magnitude(tensor: torch.Tensor) -> Magnitude:
    """Return the largest magnitude of a float tensor; values above 1e38 in it are taken as fill values."""
    known = getattr(tensor, _KNOWN, None)
    if known is not None and known[0] == version_of(tensor):
        result: Magnitude = known[1]
        return result
    return remember(tensor, _measured(tensor))


def remember(tensor: torch.Tensor, measured: Magnitude) -> Magnitude:
    """Cache the magnitude of `tensor` until it is written to; inference tensors are not cached."""
    version = version_of(tensor)
    if version is not None:
        setattr(tensor, _KNOWN, (version, measured))
    return measured


def pass_on(source: torch.Tensor, copy: torch.Tensor) -> None:
    """Copy the cached magnitude of `source` to `copy`, which has the same values."""
    known = getattr(source, _KNOWN, None)
    if known is not None and known[0] == version_of(source):
        remember(copy, known[1])


def _measured(tensor: torch.Tensor) -> Magnitude:
    if not tensor.numel():
        return Magnitude(0.0)
    with _few_threads(tensor):
        low, high = (float(each) for each in torch.aminmax(tensor.detach()))
    largest = max(-low, high) if low == low and high == high else math.nan
    if largest < FILL or math.isnan(largest):
        return Magnitude(largest)
    values = tensor.detach().abs()
    inside = values[values < FILL]
    return Magnitude(float(inside.max()) if inside.numel() else 0.0, filled=True)


def largest_rows(tensor: torch.Tensor) -> list[float]:
    """Return the largest magnitude of each row, the first dimension of a float tensor."""
    with _few_threads(tensor):
        low, high = torch.aminmax(tensor.detach().reshape(tensor.shape[0], -1), dim=1)
    return [float(each) for each in torch.maximum(-low, high)]


@contextmanager
def _few_threads(tensor: torch.Tensor) -> Iterator[None]:
    """Use one thread for a tensor that takes about a millisecond.

    On busy cores, threads that wait for one another take a hundred times as long.
    """
    before = torch.get_num_threads()
    few = before > 1 and tensor.numel() <= _SHARED_OUT and tensor.device.type == "cpu"
    if few:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if few:
            torch.set_num_threads(before)


def flushed_shares(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the shares of nonzero values that float16 rounds to zero: unscaled, and at a loss scale of
    65536.

    Large tensors are sampled evenly.
    """
    values = sampled(tensor).abs()
    nonzero = int(torch.count_nonzero(values))
    if not nonzero:
        return 0.0, 0.0
    kept = int(torch.count_nonzero(values > FLOAT16_FLUSHED))
    scaled = nonzero if kept == nonzero else int(torch.count_nonzero(values > _SCALED))
    return 1.0 - kept / nonzero, 1.0 - scaled / nonzero


def median(tensor: torch.Tensor) -> float:
    """Return the median magnitude of the nonzero values of a float tensor; large ones are sampled evenly."""
    values = sampled(tensor).float().abs()
    nonzero = values[values > 0]
    return float(nonzero.median()) if nonzero.numel() else 0.0


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return at most 2^15 values of a tensor, evenly spaced in memory; all of a smaller one."""
    # In memory order: a transposed matrix would be copied.
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.detach().permute(order).reshape(-1)
    # An odd step covers every column of a matrix with even width.
    step = max(1, -(-flat.numel() // _SAMPLE))
    return flat[:: step if step == 1 else step | 1]
