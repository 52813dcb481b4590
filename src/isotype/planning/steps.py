"""The steps of one set of settings; each batch shape is traced once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from isotype.precision.devices.profile import DeviceProfile
from isotype.preflight.run import trace_of
from isotype.records.step_time import StepTime
from isotype.records.trace import Trace
from isotype.rules.kit.step_time import step_time
from isotype.train.preflight.step import PlannedStep
from isotype.train.recompute_choice import NotForeseenError


@dataclass(frozen=True)
class Traced:
    """The step of one batch shape.

    Attributes:
        peak: bytes at the peak of any step.
        phase: of that peak.
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

    `step` is built for one of the devices; `traced`: (rows, tokens) -> trace.
    """

    step: PlannedStep
    arguments: Mapping[str, Any] | None
    profiles: tuple[DeviceProfile, ...]
    traced: dict[tuple[int, int], Traced] = field(default_factory=dict)

    def at(self, rows: int, tokens: int) -> Traced:
        """Return the step with `rows` rows of `tokens` tokens.

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
        """Return the bytes at the step's peak."""
        return self.at(rows, tokens).peak


def _traced(trace: Trace, profiles: tuple[DeviceProfile, ...]) -> Traced:
    memory = trace.memory
    phase = memory.peak_phase or "load"
    kinds: dict[str, int] = {kind: size for kind, size in memory.phases.get(phase, {}).items() if size}
    times = {
        each.name: step_time(replace(trace, setup=replace(trace.setup, profile=each))) for each in profiles
    }
    return Traced(memory.peak, phase, kinds, times, trace.notes)
