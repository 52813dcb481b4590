"""The steps of one set of settings, each shape of a batch traced once."""

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
