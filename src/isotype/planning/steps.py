"""The steps of one set of settings; each batch shape is traced once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from isotype.precision.devices.profile import DeviceProfile
from isotype.records.memory import StepTime
from isotype.records.trace import Trace
from isotype.rules.kit.costs import step_time
from isotype.train.preflight.step import PlannedStep
from isotype.train.run import Choice


@dataclass(frozen=True)
class Traced:
    """The step of one batch shape.

    Attributes:
        peak: bytes at the peak of any step.
        kinds: kind -> bytes alive at the peak.
        times: profile name -> its least and traced time; None if it has no rates.
        notes: what the trace leaves out, and layers without adapter.
    """

    peak: int
    phase: str
    kinds: Mapping[str, int]
    times: Mapping[str, StepTime | None]
    notes: tuple[str, ...]


@dataclass
class Steps:
    """Steps of one storage, dtype, checkpointing and sharding, on devices that run them alike.

    `step` is built for one of the devices; `arguments` of `gradient_checkpointing_enable` are None for no layer;
    `traced`: (rows, tokens) -> trace.
    """

    step: PlannedStep
    arguments: Mapping[str, Any] | None
    profiles: tuple[DeviceProfile, ...]
    traced: dict[tuple[int, int], Traced] = field(default_factory=dict)

    @property
    def checkpointing(self) -> str:
        """Checkpointing in words."""
        return Choice(self.arguments, "").words

    @property
    def sharding(self) -> str:
        """`""`, `DDP` or `FSDP2`."""
        plan = self.step.plan
        return "" if plan.devices == 1 else "FSDP2" if plan.fsdp else "DDP"

    @property
    def key(self) -> tuple[str, str, str]:
        """Storage, checkpointing and sharding of their rows."""
        return self.step.policy.form, self.checkpointing, self.sharding

    def at(self, rows: int, tokens: int) -> Traced:
        """Return the step with `rows` rows of `tokens` tokens; raise NotForeseenError if it cannot be traced."""
        key = (rows, tokens)
        if key not in self.traced:
            trace = self.step.traced(self.arguments, rows, tokens)
            adapted = getattr(self.step.model(self.arguments)[0], "adapter_notes", ())
            self.traced[key] = _traced(trace, self.profiles, (*trace.notes, *adapted))
        return self.traced[key]

    def peak(self, rows: int, tokens: int) -> int:
        """Return the bytes at the step's peak."""
        return self.at(rows, tokens).peak

    def seconds(self, device: str, rows: int, tokens: int) -> float | None:
        """Return the traced time of the step on a device in seconds; None if it has no rates."""
        time = self.at(rows, tokens).times[device]
        return None if time is None else time.traced_seconds


def _traced(trace: Trace, profiles: tuple[DeviceProfile, ...], notes: tuple[str, ...]) -> Traced:
    memory = trace.memory
    phase = memory.peak_phase or "load"
    kinds: dict[str, int] = {kind: size for kind, size in memory.phases.get(phase, {}).items() if size}
    times = {
        profile.name: step_time(replace(trace, setup=replace(trace.setup, profile=profile)))
        for profile in profiles
    }
    return Traced(memory.peak, phase, kinds, times, notes)


_SECANTS, _ATTEMPTS = 5, 14
"""Secant steps before bisection takes over; measurements in all."""


def largest(
    measure: Callable[[int], int],
    high: int,
    room: int,
    low: int = 1,
    *,
    enough: Callable[[int, int], bool] = lambda low, high: high - low <= 1,
    high_first: bool = True,
) -> int | None:
    """Return the largest number in `low` … `high` whose measure (bytes) is at most `room`; None if that of `low` is
    more.

    A step's peak is the maximum of moments that are each linear in the rows and polynomial in their length: a convex
    function. Past two measured points it is at least their secant. The search ends once the secant leaves no room for
    the next number: after three measurements if the function is linear, after one if `high` fits. `enough(low, high)`
    ends it earlier.
    """
    known: dict[int, int] = {}

    def fits(number: int) -> bool:
        known[number] = measure(number)
        return known[number] <= room

    if high_first and fits(high):
        return high
    if not fits(low):
        return None
    if low == high:
        return low
    for attempt in range(_ATTEMPTS):
        best = max(number for number in known if known[number] <= room)
        limit = min((number for number in known if known[number] > room), default=high + 1)
        tried = _next(known, best, limit, room)
        if tried <= best or enough(best, min(limit, tried + 1)):
            return best
        if attempt >= _SECANTS:
            tried = min(tried, max(best + 1, (best + limit) // 2))
        fits(tried)
    return max(number for number in known if known[number] <= room)


def _next(known: Mapping[int, int], best: int, limit: int, room: int) -> int:
    """Return the number to measure next, in `best` … `limit` - 1: the largest that fits by the secant of two known
    points.

    If only one point below the limit is known: the one by the chord to the limit, or the limit itself.
    """
    if below := [number for number in known if number < best]:
        before = max(below)
        slope = (known[best] - known[before]) / (best - before)
        return min(limit - 1, best + int((room - known[best]) / slope)) if slope > 0 else limit - 1
    if limit in known:
        slope = (known[limit] - known[best]) / (limit - best)
        return min(limit - 1, max(best + 1, best + int((room - known[best]) / slope)))
    return limit - 1
