"""The least time of a step on a device, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Products:
    """The matmul-like operators of one dtype.

    Attributes:
        flops: FLOPs of a step, of attention half.
        flops_per_second: the device's dense peak rate.
        emulated_in: the dtype whose rate that is, where the device has no units for their own and converts their operands; else None.
    """

    flops: float
    flops_per_second: float
    emulated_in: torch.dtype | None = None

    @property
    def seconds(self) -> float:
        """Least seconds of a step."""
        return self.flops / self.flops_per_second


@dataclass(frozen=True)
class StepTime:
    """The least time of one step.

    Attributes:
        seconds: sum of the seconds of the products, by what bounds each: no fusion of the rest is faster.
        traced_seconds: the same sum over all operators as they were traced, fused and launched as `DeviceProfile.steps` says, if it does.
        products: by the dtype they run in.
        bytes: that all operators read and write.
        bytes_per_second: the device's memory bandwidth.
        launches: operators that run on the device, each one kernel at least.
        tokens: of the step's batch on one device, None where it has none.
        host_seconds: of the launches of kernels; 0 where nobody knows what one takes.
    """

    seconds: float
    traced_seconds: float
    products: Mapping[torch.dtype, Products]
    bytes: int
    bytes_per_second: float
    launches: int
    tokens: int | None
    host_seconds: float = 0.0

    @property
    def products_seconds(self) -> float:
        """Least seconds of all products."""
        return sum(each.seconds for each in self.products.values())

    @property
    def traffic_seconds(self) -> float:
        """Least seconds of all reads and writes."""
        return self.bytes / self.bytes_per_second

    @property
    def bound(self) -> Literal["products", "memory traffic", "launches"]:
        """What most of the traced step goes to."""
        if self.host_seconds >= self.traced_seconds:
            return "launches"
        return "products" if self.products_seconds > self.traced_seconds / 2 else "memory traffic"

    @property
    def tokens_per_second(self) -> float | None:
        """The most tokens a second on one device."""
        return self.tokens / self.seconds if self.tokens is not None else None

    @property
    def launch_seconds(self) -> float:
        """What the host may take for one launch, in seconds, before a device that reached `traced_seconds` would wait for it."""
        return self.traced_seconds / self.launches
