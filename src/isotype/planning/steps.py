"""Traces steps that differ only in the shape of their batch. Each shape of a batch is traced once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from isotype.precision.devices.profile import DeviceProfile
from isotype.records.memory import MemoryKind, StepTime
from isotype.records.trace import Trace
from isotype.rules.kit.costs import step_time
from isotype.train.preflight.step import PlannedStep
from isotype.train.run import Choice

_OF_BATCH: tuple[MemoryKind, ...] = ("activations", "inputs", "predictions")


@dataclass(frozen=True)
class Traced:
    """Memory and time of the step for one shape of the batch.

    Attributes:
        peak: bytes at the memory peak over the first step and all later steps.
        kinds: kind -> bytes in memory at the peak.
        times: profile name -> time of the step; None for a profile without rates.
        notes: sentences about parts that the trace leaves out, and about layers without an adapter.
    """

    peak: int
    phase: str
    kinds: Mapping[str, int]
    times: Mapping[str, StepTime | None]
    notes: tuple[str, ...]

    @property
    def fixed(self) -> int:
        """Bytes at the peak that do not depend on the batch: weights, adapters, gradients, optimizer states."""
        return self.peak - sum(self.kinds.get(kind, 0) for kind in _OF_BATCH)


@dataclass
class Steps:
    """Steps with one storage, dtype, checkpointing and sharding, on devices that run the same operators.

    Attributes:
        step: the step for one of the devices.
        arguments: arguments of the model's `gradient_checkpointing_enable`; None if no layer is recomputed.
        traced: the traced steps by (rows, tokens).
    """

    step: PlannedStep
    arguments: Mapping[str, Any] | None
    profiles: tuple[DeviceProfile, ...]
    traced: dict[tuple[int, int], Traced] = field(default_factory=dict)

    @property
    def checkpointing(self) -> str:
        """Description of the recomputed layers, such as `off` or `every layer`."""
        return Choice(self.arguments, "").words

    @property
    def sharding(self) -> str:
        """`""`, `DDP` or `FSDP2`."""
        plan = self.step.plan
        return "" if plan.devices == 1 else "FSDP2" if plan.fsdp else "DDP"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.step.policy.form, self.checkpointing, self.sharding

    def at(self, rows: int, tokens: int) -> Traced:
        """Return the step with `rows` rows of `tokens` tokens; raise NotForeseenError if it cannot be traced."""
        key = (rows, tokens)
        if key not in self.traced:
            trace = self.step.traced(self.arguments, rows, tokens)
            untraced = (f"not traced: {part}" for part in trace.untraced_parts())
            adapted = getattr(self.step.model(self.arguments)[0], "adapter_notes", ())
            self.traced[key] = _traced(trace, self.profiles, (*untraced, *trace.notes, *adapted))
        return self.traced[key]

    @cached_property
    def constant(self) -> Traced:
        """The memory of weights, adapters and buffers. No trace is needed."""
        kinds, names = self.step.constant_bytes(self.arguments), [profile.name for profile in self.profiles]
        return Traced(sum(kinds.values()), "load", kinds, dict.fromkeys(names), ())

    def peak(self, rows: int, tokens: int) -> int:
        return self.at(rows, tokens).peak

    def seconds(self, device: str, rows: int, tokens: int) -> float | None:
        """Return the traced time of the step on a device in seconds; None if the device has no rates."""
        time = self.at(rows, tokens).times[device]
        return None if time is None else time.traced_seconds


def _traced(trace: Trace, profiles: tuple[DeviceProfile, ...], notes: tuple[str, ...]) -> Traced:
    memory = trace.memory
    phase = memory.peak_phase or "load"
    kinds: dict[str, int] = {kind: size for kind, size in memory.phases.get(phase, {}).items() if size}
    setups = {profile.name: replace(trace.setup, profile=profile) for profile in profiles}
    times = {name: step_time(replace(trace, setup=setup)) for name, setup in setups.items()}
    return Traced(memory.peak, phase, kinds, times, notes)


_SECANTS, _ATTEMPTS = 5, 14
"""`largest` bisects after `_SECANTS` secant steps, and measures at most `_ATTEMPTS` numbers between its limits."""


def largest(
    measure: Callable[[int], int],
    high: int,
    room: int,
    low: int = 1,
    *,
    enough: Callable[[int, int], bool] = lambda low, high: high - low <= 1,
    high_first: bool = True,
) -> int | None:
    """Return the largest number from `low` to `high` for which `measure` returns at most `room` bytes, or None.

    At each moment of a step, memory is linear in the number of rows and polynomial in their length. Therefore the
    peak of the step is a convex function. Beyond two measured points, the peak is never below the line through both
    points (the secant). The search ends if the secant shows that the next number exceeds `room`. It ends earlier if
    `enough(low, high)` is True.
    """
    measured: dict[int, int] = {}

    def fits(number: int) -> bool:
        measured[number] = measure(number)
        return measured[number] <= room

    if high_first and fits(high):
        return high
    if not fits(low):
        return None
    if low == high:
        return low
    for attempt in range(_ATTEMPTS):
        best = max(number for number in measured if measured[number] <= room)
        limit = min((number for number in measured if measured[number] > room), default=high + 1)
        tried = _next(measured, best, limit, room)
        if tried <= best or enough(best, min(limit, tried + 1)):
            return best
        if attempt >= _SECANTS:
            tried = min(tried, max(best + 1, (best + limit) // 2))
        fits(tried)
    return max(number for number in measured if measured[number] <= room)


def _next(measured: Mapping[int, int], best: int, limit: int, room: int) -> int:
    """Return the next number to measure, which is between `best` and `limit` - 1.

    The memory is extrapolated from the two largest numbers that fit, or interpolated between `best` and `limit`. If only
    one number was measured, the result is `limit` - 1.
    """
    if below := [number for number in measured if number < best]:
        before = max(below)
        slope = (measured[best] - measured[before]) / (best - before)
        return min(limit - 1, best + int((room - measured[best]) / slope)) if slope > 0 else limit - 1
    if limit in measured:
        slope = (measured[limit] - measured[best]) / (limit - best)
        return min(limit - 1, max(best + 1, best + int((room - measured[best]) / slope)))
    return limit - 1
