"""Phases of a step, and its memory by phase and kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["load", "forward", "backward", "unscale", "optimizer", "evaluate", "generate"]

PHASES: tuple[Phase, ...] = get_args(Phase)

MemoryKind = Literal[
    "weights",
    "adapters",
    "buffers",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "gathered",  # gathered weights while a block of a sharded model computes, with their communication buffers
    "buckets",  # buffers in which gradients are summed over processes
]
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes of live tensors at one moment, by kind."""

    phase: Phase
    kinds: Mapping[MemoryKind, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Memory:
    """Bytes of live tensors at the peak of each phase.

    Attributes:
        phases: phase -> kind -> bytes at that phase's peak.
        timeline: at most about 500 moments of the step in order: the highest of each interval.
    """

    phases: Mapping[Phase, Mapping[MemoryKind, int]]
    timeline: tuple[MemoryPoint, ...] = ()

    @property
    def peak_phase(self) -> Phase | None:
        """The phase of the overall peak; None for an empty record."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()), default=None)

    @property
    def peak(self) -> int:
        """Bytes at the overall peak."""
        return max((sum(kinds.values()) for kinds in self.phases.values()), default=0)
