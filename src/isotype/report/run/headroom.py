"""Compares the largest output values of a model's blocks during a run with the largest number of float16.

The results are quantiles and medians over the sampled micro-batches, so one unusual batch has little effect.
"""

import math
import statistics
from dataclasses import dataclass

from isotype.precision.ranges import FLOAT16_LARGEST
from isotype.report.html import format_number

_LEAST = 6
"""Minimum number of samples to compute the change over the run."""
_LITTLE = 2.0
"""A headroom below this factor causes a warning, because values of another batch may be larger by this factor."""


@dataclass(frozen=True)
class HeadroomSample:
    """The largest magnitude of each block's output in one micro-batch.

    Attributes:
        step: number of the optimizer step to which the micro-batch belongs.
        largest: largest magnitude of each block's output, in the order of the blocks. Infinite after an overflow.
    """

    step: int
    largest: tuple[float, ...]


@dataclass(frozen=True)
class Headroom:
    """The largest magnitude of each block's output in each sampled micro-batch of a float16 run.

    Attributes:
        blocks: fully qualified names of the blocks, in forward order.
        dtype: dtype of the blocks' outputs. Values above 65504 overflow only in `"float16"`.
        samples: sampled micro-batches, in the order of the steps.
    """

    blocks: tuple[str, ...]
    dtype: str
    samples: tuple[HeadroomSample, ...]


@dataclass(frozen=True)
class BlockHeadroom:
    """Statistics of one block over the run. Each sample is the largest magnitude in the block's output for one
    micro-batch.

    Attributes:
        high: 0.9 quantile of the samples.
        headroom: 65504 / `high`, or infinite if the block returned only zeros.
        change: median of the last third of the samples, divided by the median of the first third. None if there are fewer than
            six samples.
    """

    name: str
    median: float
    high: float
    headroom: float
    change: float | None

    @property
    def used(self) -> float:
        """Fraction of float16's range up to `high`, on a logarithmic scale."""
        return min(1.0, max(0.0, math.log2(max(self.high, 1.0)) / math.log2(FLOAT16_LARGEST)))


def by_block(headroom: Headroom) -> tuple[BlockHeadroom, ...]:
    blocks = []
    for number, name in enumerate(headroom.blocks):
        values = [sample.largest[number] for sample in headroom.samples]
        high = sorted(values)[math.ceil(0.9 * len(values)) - 1]
        third = len(values) // 3
        first, last = map(statistics.median, (values[:third], values[-third:])) if third else (0.0, 0.0)
        change = last / first if len(values) >= _LEAST and 0 < first < math.inf else None
        room = FLOAT16_LARGEST / high if high else math.inf
        blocks.append(BlockHeadroom(name, statistics.median(values), high, room, change))
    return tuple(blocks)


def in_words(headroom: Headroom) -> str:
    least = min(by_block(headroom), key=lambda block: block.headroom)
    sampled = f"{len(headroom.samples):,} sampled"
    several = len(headroom.samples) > 1
    where = f"in nine of ten micro-batches ({sampled})" if several else "in the only sampled micro-batch"
    if math.isinf(least.high):
        return f"In more than one of ten micro-batches ({sampled}), outputs of {least.name} exceed 65,504, the largest number of float16."
    text = (
        f"{least.name} has the largest outputs: up to {format_number(least.high, 4)} {where}. "
        f"float16's largest number, 65,504, is {format_number(least.headroom, 3)} times as large."
    )
    if headroom.dtype == "float16" and least.headroom < _LITTLE:
        text += " Other batches may exceed float16's range. bfloat16 or a float32 residual stream has more headroom."
    if least.change and not 0.9 < least.change < 1.1:
        ratio = least.change if least.change > 1 else 1 / least.change
        grew = "grew" if least.change > 1 else "shrank"
        text += f" The block's outputs {grew} by a factor of {format_number(ratio, 3)} over the run."
    if headroom.dtype != "float16":
        text += f" The blocks return their outputs in {headroom.dtype}, which has a far larger range."
    return text
