"""The steps of one set of settings, each shape of a batch traced once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from isotype.precision.devices.profile import DeviceProfile
from isotype.preflight.run import trace_of
from isotype.records.step_time import StepTime
from isotype.records.trace import Trace
from isotype.rules.kit.step_time import step_time
from isotype.train.preflight.step import PlannedStep
from isotype.train.recompute_choice import NotForeseenError

_SECANTS, _ATTEMPTS = 5, 14
"""Numbers that the search takes from lines through known ones, and all of them: from there on it halves what is left."""


@dataclass(frozen=True)
class Traced:
    """One shape's step.

    Attributes:
        peak: bytes at the worst moment of any step.
        phase: of that moment.
        kinds: what is alive there, kind -> bytes.
        times: name of a profile -> its least and traced time; None where it has no rates.
        notes: what the trace leaves out, and what has no adapter.
    """

    peak: int
    phase: str
    kinds: Mapping[str, int]
    times: Mapping[str, StepTime | None]
    notes: tuple[str, ...]


@dataclass
class Steps:
    """Steps of one storage, dtype, checkpointing and sharding, on devices that run them alike.

    Attributes:
        step: with its policy; built for one of the devices.
        arguments: of the model's `gradient_checkpointing_enable`; None for no layer.
        profiles: the devices whose time is wanted.
        traced: (rows, tokens) -> what was traced.
    """

    step: PlannedStep
    arguments: Mapping[str, Any] | None
    profiles: tuple[DeviceProfile, ...]
    traced: dict[tuple[int, int], Traced] = field(default_factory=dict)

    def at(self, rows: int, tokens: int) -> Traced:
        """The step with so many rows of so many tokens.

        Raises:
            NotForeseenError: it cannot be traced to its end.
        """
        key = (rows, tokens)
        if key not in self.traced:
            request = self.step.request(self.arguments, rows, tokens)
            trace = trace_of(request)
            if trace.failure is not None:
                raise NotForeseenError(f"it could not be traced ({trace.failure.error})")
            adapted = tuple(getattr(request.model, "adapter_notes", ()))
            self.traced[key] = _traced(replace(trace, notes=(*trace.notes, *adapted)), self.profiles)
        return self.traced[key]

    def peak(self, rows: int, tokens: int) -> int:
        """Bytes at its worst moment."""
        return self.at(rows, tokens).peak


def _traced(trace: Trace, profiles: tuple[DeviceProfile, ...]) -> Traced:
    memory = trace.memory
    phase = memory.peak_phase or "load"
    kinds: dict[str, int] = {kind: size for kind, size in memory.phases.get(phase, {}).items() if size}
    times = {
        each.name: step_time(replace(trace, setup=replace(trace.setup, profile=each))) for each in profiles
    }
    return Traced(memory.peak, phase, kinds, times, trace.notes)


def largest(
    measure: Callable[[int], int],
    high: int,
    room: int,
    low: int = 1,
    *,
    enough: Callable[[int, int], bool] = lambda low, high: high - low <= 1,
    high_first: bool = True,
) -> int | None:
    """The largest number in `low` … `high` whose measure has room; None where that of `low` has none.

    What a step takes is the highest of several moments, each of which grows in proportion to rows and by a polynomial of
    their length: a convex function. A chord is never below it between its ends, nor above it past them: a number past two
    that were measured takes at least what the line through them says. The search ends where that line leaves no room for the
    next one, so that a step in proportion takes three measures, or one where all of it fits.

    Args:
        measure: bytes; grows with the number.
        high, low: the numbers looked at.
        room: bytes.
        enough: asked about a number that has room and a larger one that has none: whether those between are of no interest.
        high_first: whether `high` is measured before `low`.
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
    """The number to measure next, in `best` … `limit` - 1: the largest that the line through two known points leaves room for.

    Where only one below the limit is known: the one that a chord to the limit promises, or the limit itself.
    """
    below = [number for number in known if number < best]
    if below:
        before = max(below)
        slope = (known[best] - known[before]) / (best - before)
        return min(limit - 1, best + int((room - known[best]) / slope)) if slope > 0 else limit - 1
    if limit in known:
        slope = (known[limit] - known[best]) / (limit - best)
        return min(limit - 1, max(best + 1, best + int((room - known[best]) / slope)))
    return limit - 1
