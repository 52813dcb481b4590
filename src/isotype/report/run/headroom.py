"""The part of float16's range that a model's blocks use over a run, and its summary.

A single batch may contain an unusual row, so limits are quantiles over the samples, and changes compare medians.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from isotype.precision.ranges import FLOAT16_LARGEST
from isotype.report.html import escape, format_number

_LEAST = 6
"""Minimum number of samples for a change over the run."""
_LITTLE = 2.0
"""Headroom below which a warning is printed: batches differ by as much."""


@dataclass(frozen=True)
class HeadroomSample:
    """The largest magnitudes of the blocks' outputs in one micro-batch.

    Attributes:
        step: optimizer step of the micro-batch.
        largest: of each block, in order; infinite after an overflow.
    """

    step: int
    largest: tuple[float, ...]


@dataclass(frozen=True)
class Headroom:
    """Samples of a run that computes in float16.

    Attributes:
        blocks: fully qualified names, in order.
        dtype: of the blocks' outputs: values beyond 65504 are lost only in `"float16"`.
        samples: in the order of the steps.
    """

    blocks: tuple[str, ...]
    dtype: str
    samples: tuple[HeadroomSample, ...]


@dataclass(frozen=True)
class BlockHeadroom:
    """A block over the run.

    Attributes:
        median: median over the samples of the largest magnitude.
        high: the 0.9 quantile of the largest magnitude.
        headroom: 65504 over `high`; infinite if the block returned only zeros.
        change: median of the last third of the samples over that of the first; None if there are fewer than six.
    """

    name: str
    median: float
    high: float
    headroom: float
    change: float | None


def by_block(headroom: Headroom) -> tuple[BlockHeadroom, ...]:
    """Summarize the samples block by block."""
    blocks = []
    for number, name in enumerate(headroom.blocks):
        values = [sample.largest[number] for sample in headroom.samples]
        high = sorted(values)[math.ceil(0.9 * len(values)) - 1]
        third = len(values) // 3
        first, last = (_median(part) for part in (values[:third], values[-third:])) if third else (0.0, 0.0)
        change = last / first if len(values) >= _LEAST and 0 < first < math.inf else None
        left = FLOAT16_LARGEST / high if high else math.inf
        blocks.append(BlockHeadroom(name, _median(values), high, left, change))
    return tuple(blocks)


def _median(values: Sequence[float]) -> float:
    return statistics.median(sorted(values))


def in_words(headroom: Headroom) -> str:
    """Describe the block with the least headroom, and its change over the run."""
    blocks = by_block(headroom)
    least = min(blocks, key=lambda block: block.headroom)
    count = len(headroom.samples)
    looked = (
        f"in nine of ten micro-batches ({count:,} sampled)" if count > 1 else "in the one sampled micro-batch"
    )
    if math.isinf(least.high):
        return f"{least.name} passes 65,504, float16's largest number, in more than one of ten micro-batches ({count:,} sampled)."
    said = (
        f"{least.name} gives the largest values, up to {format_number(least.high, 4)} {looked}; "
        f"65,504, float16's largest number, is {format_number(least.headroom, 3)} times that."
    )
    if headroom.dtype == "float16" and least.headroom < _LITTLE:
        said += " That is little: batches differ by as much. bfloat16 or a float32 residual stream has more."
    if least.change and not 0.9 < least.change < 1.1:
        ratio = least.change if least.change > 1 else 1 / least.change
        grew = "grew" if least.change > 1 else "shrank"
        said += f" The values {grew} by a factor of {format_number(ratio, 3)} over the run."
    if headroom.dtype != "float16":
        said += f" The blocks' outputs are carried in {headroom.dtype}, which holds far more."
    return said


def bar(block: BlockHeadroom) -> str:
    """Return the part of float16's range that a block uses, in powers of two."""
    used = min(1.0, max(0.0, math.log2(max(block.high, 1.0)) / math.log2(FLOAT16_LARGEST)))
    words = escape(f"{block.name}: up to {format_number(block.high, 4)}")
    return (
        f'<svg class="range" role="img" aria-label="{words}"><rect class="all" width="100%" height="100%"/>'
        f'<rect class="used" width="{100 * used:.1f}%" height="100%"/></svg>'
    )
