"""What a check found, as pure data; the writers (text, JSON, SARIF, HTML) read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from isotype.core.names import plain_name
from isotype.records.finding import Action, Finding, Severity
from isotype.records.memory import Memory
from isotype.records.step_time import StepTime
from isotype.records.trace import Trace
from isotype.rules.kit.step_time import step_time
from isotype.rules.kit.value_ranges import Held, computes_float16, largest

Again = Callable[[Sequence[Action]], tuple[Finding, ...]]
Status = Literal["fails", "does not fit", "unknown", "costs", "unmeasured", "partial", "clean"]
Known = Literal["measured", "known", "unknown"]


@dataclass(frozen=True)
class Record:
    """A step that was seen and judged.

    Attributes:
        trace: the step on fake tensors, before any fix.
        findings: errors first, then by code.
        seconds: wall-clock time of the whole check.
        again: traces the same step with actions applied and judges it; None for a report that was read back.
    """

    trace: Trace
    findings: tuple[Finding, ...]
    seconds: float = 0.0
    again: Again | None = field(default=None, repr=False, compare=False)

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that crash or corrupt the step."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that silently cost speed, memory or precision."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings worth knowing that cost nothing."""
        return self._of("note")

    @property
    def ok(self) -> bool:
        """Whether there is no error finding; `complete` says whether the step was traced to its end."""
        return not self.errors

    @property
    def complete(self) -> bool:
        """Whether the step was traced to its end: what lies behind `trace.failure` was not judged."""
        return self.trace.failure is None

    @property
    def memory(self) -> Memory:
        """Bytes alive at the worst moment of each phase, by kind."""
        return self.trace.memory

    @property
    def flops(self) -> dict[torch.dtype, int]:
        """FLOPs of the matmul-like operators of one step by the dtype they run in."""
        return self.trace.flops

    @property
    def time(self) -> StepTime | None:
        """The least time of the step by the device's data sheet, with what goes into it; None where that is not known."""
        return step_time(self.trace)

    @property
    def fits(self) -> bool | None:
        """The peak is within the device's memory that a step may take; None if either is not known."""
        limit, peak = self.trace.setup.limit, self.memory.peak
        return None if limit.size is None or not peak else limit.holds(peak)

    @property
    def status(self) -> Status:
        """The one word of the verdict: the worst that is known."""
        if any(finding.kind != "memory" for finding in self.errors):
            return "fails"
        if self.errors or self.fits is False:
            return "does not fit"
        if not self.complete:
            return "unknown"
        if self.warnings:
            return "costs"
        if self.ranges in ("known", "unknown"):
            return "unmeasured"
        return "partial" if self.unseen else "clean"

    @property
    def unseen(self) -> tuple[str, ...]:
        """The towers of the model that nothing of the step went through: its inputs have no picture, or no sound."""
        towers = self.trace.setup.towers
        if not towers:
            return ()
        modules = {plain_name(call.module) for call in self.trace.calls}
        return tuple(t for t in towers if not any(f"{each}.".startswith(f"{t}.") for each in modules))

    @property
    def miswired(self) -> bool:
        """Whether the step runs, and all that is wrong is what reaches what."""
        return bool(self.errors) and all(finding.kind == "wiring" for finding in self.errors)

    @property
    def ranges(self) -> Known | None:
        """What is known of the values of a step with float16 in it: they were measured, something is publicly known of the
        model's family, or nothing; None of a step without float16."""
        if not computes_float16(self.trace):
            return None
        if self.trace.setup.ranges is not None:
            return "measured"
        return "known" if self.trace.setup.family_ranges else "unknown"

    @property
    def largest(self) -> Held | None:
        """The largest measured value that the forward holds in float16; None where none was measured."""
        return largest(self.trace)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Operators whose contract was broken but was taken from their family's rule, not measured on the device."""
        operators = (
            call.op for call in self.trace.breaches() if call.breach is not None and call.breach.assumed
        )
        return tuple(sorted(set(operators)))


Outlook = Literal["repair", "unsafe", "untried", "caller", "left"]


def repair_outlook(report: Record) -> dict[Outlook, tuple[Finding, ...]]:
    """The errors and warnings by who resolves them with their first fix, each tried alone.

    `repair`: `isotype.repair` by a change of the model; `unsafe`: the same where it is asked for; `caller`: a setting,
    a line or advice; `untried`: fixes that no second trace has tried; `left`: no fix is known.
    """
    outlooks: dict[Outlook, list[Finding]] = {kind: [] for kind in get_args(Outlook)}
    for finding in (*report.errors, *report.warnings):
        outlooks[_outlook(finding)].append(finding)
    return {kind: tuple(some) for kind, some in outlooks.items()}


def _outlook(finding: Finding) -> Outlook:
    if not finding.fixes:
        return "left"
    first = finding.fixes[0]
    if first.scope == "advice" or (first.verified and first.scope != "model"):
        return "caller"
    if not first.verified:
        return "untried"
    return "repair" if first.safety == "safe" else "unsafe"
