"""Phases of a step, and its memory by phase and kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

Phase = Literal["load", "forward", "backward", "unscale", "optimizer", "evaluate", "rollout", "generate"]

PHASES: tuple[Phase, ...] = get_args(Phase)

BETWEEN_STEPS: tuple[Phase, ...] = ("evaluate", "rollout")
"""Phases without gradients between steps (`StepRequest.evaluation`). A trace contains the memory of these phases, but not their calls."""

MemoryKind = Literal[
    "weights",
    "adapters",
    "buffers",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "predictions",  # of evaluated batches, which stay in memory until metrics are computed
    "gathered",  # weights that a sharded model's block has gathered, with their communication buffers
    "buckets",  # buffers that sum gradients over processes
]
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes of the tensors in memory at one moment, by kind."""

    phase: Phase
    kinds: Mapping[MemoryKind, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Memory:
    """Bytes of the tensors in memory at the peak of each phase.

    Attributes:
        phases: phase -> kind -> bytes at the peak of the phase.
        timeline: for each of at most about 500 intervals of the step, the moment with the most bytes.
        saved: phase -> bytes of activations that layers (`model.layers.0`) saved for the backward, up to that phase's peak.
        layers: number of layers whose forward saved activations.
    """

    phases: Mapping[Phase, Mapping[MemoryKind, int]]
    timeline: tuple[MemoryPoint, ...] = ()
    saved: Mapping[Phase, int] = field(default_factory=dict)
    layers: int = 0

    @property
    def peak_phase(self) -> Phase | None:
        """Phase of the overall peak; None if not measured."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()), default=None)

    @property
    def peak(self) -> int:
        """Bytes at the highest peak of all phases; 0 if not measured."""
        return max((sum(kinds.values()) for kinds in self.phases.values()), default=0)


@dataclass(frozen=True)
class Products:
    """The matmul-like operators of one dtype.

    Attributes:
        flops: FLOPs of a step. Attention counts half, as with a causal mask.
        flops_per_second: the device's dense peak rate.
        emulated_in: the dtype in which the device computes if it has no hardware for the operands' dtype; else None.
            `flops_per_second` is the rate of `emulated_in`.
    """

    flops: float
    flops_per_second: float
    emulated_in: torch.dtype | None = None

    @property
    def seconds(self) -> float:
        """Minimum seconds of these products in a step."""
        return self.flops / self.flops_per_second


@dataclass(frozen=True)
class StepTime:
    """The minimum time of one step. Here, a product is a matmul-like operator.

    Attributes:
        seconds: minimum seconds of the products. A product takes as long as its compute or its memory traffic, whichever is
            longer. Kernel fusion does not shorten products.
        traced_seconds: minimum seconds of all traced operators. If the device has rates of whole steps (`DeviceProfile.steps`),
            kernel fusion and launches are included.
        products: dtype -> products.
        bytes: bytes that all operators read and write.
        bytes_per_second: the device's memory bandwidth.
        launches: number of operators on the device. Each operator launches at least one kernel.
        tokens: tokens of the step's batch on one device; None if the batch has no tokens.
        host_seconds: seconds that the host needs for the kernel launches; 0 if unknown.
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
        """Minimum seconds of all products."""
        return sum(products.seconds for products in self.products.values())

    @property
    def traffic_seconds(self) -> float:
        """Minimum seconds of all reads and writes."""
        return self.bytes / self.bytes_per_second

    @property
    def bound(self) -> Literal["products", "memory traffic", "launches"]:
        """The kind of work that takes most of the traced step's time."""
        if self.host_seconds >= self.traced_seconds:
            return "launches"
        return "products" if self.products_seconds > self.traced_seconds / 2 else "memory traffic"

    @property
    def tokens_per_second(self) -> float | None:
        """Maximum tokens per second on one device."""
        return self.tokens / self.seconds if self.tokens is not None else None

    @property
    def launch_seconds(self) -> float:
        """Mean seconds of a kernel on the device. The device has to wait if the host takes longer to launch a kernel."""
        return self.traced_seconds / self.launches
