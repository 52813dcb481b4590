"""The result of a check as data, from which its writers make text, JSON, SARIF and HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from isotype.core.names import plain_name
from isotype.records.finding import Action, Finding, Severity
from isotype.records.memory import Memory, StepTime
from isotype.records.trace import Trace
from isotype.rules.kit.costs import step_time
from isotype.rules.kit.value_ranges import Held, computes_float16, largest

Again = Callable[[Sequence[Action]], tuple[Finding, ...]]
Status = Literal["fails", "does not fit", "unknown", "costs", "unmeasured", "partial", "clean"]
Known = Literal["measured", "known", "unknown"]


@dataclass(frozen=True)
class Record:
    """A training step that was traced and judged by the rules.

    Attributes:
        trace: trace of the step on fake tensors, before any fix.
        findings: findings of the rules, errors first, then sorted by code.
        seconds: wall-clock time of the whole check, in seconds.
        again: function that traces the step again with fixes applied, and returns the findings; None if the report was
            read from a file.
    """

    trace: Trace
    findings: tuple[Finding, ...]
    seconds: float = 0.0
    again: Again | None = field(default=None, repr=False, compare=False)

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings about what crashes or corrupts the step."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings about what silently costs speed, memory or precision."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings about something that costs neither speed, memory nor precision."""
        return self._of("note")

    @property
    def ok(self) -> bool:
        """True if no finding is an error, even if the trace ended early; see `complete`."""
        return not self.errors

    @property
    def complete(self) -> bool:
        """True if the step was traced to its end. Else no rule has seen the operators after the error that ended the trace."""
        return self.trace.failure is None

    @property
    def memory(self) -> Memory:
        """Bytes of the tensors alive at the peak of each phase, by kind."""
        return self.trace.memory

    @property
    def flops(self) -> dict[torch.dtype, int]:
        """FLOPs of the matmul-like operators of one step, by compute dtype."""
        return self.trace.flops

    @property
    def operators(self) -> int:
        """Number of operators in a step of the real model."""
        return sum(call.repeats for call in self.trace.calls)

    @property
    def time(self) -> StepTime | None:
        """Least time of the step by the device's data sheet; None without published rates, or if the trace ended early."""
        return step_time(self.trace)

    @property
    def fits(self) -> bool | None:
        """True if the peak is at most the device memory that a step may take; None if the peak or limit is unknown."""
        limit, peak = self.trace.setup.limit, self.memory.peak
        return None if limit.size is None or not peak else limit.holds(peak)

    @property
    def status(self) -> Status:
        """The worst known result of the check, in one word."""
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
        """Vision and audio towers that the step does not use, since its inputs have no picture or no sound."""
        towers = self.trace.setup.towers
        modules = {plain_name(call.module) for call in self.trace.calls} if towers else set()
        return tuple(t for t in towers if not any(f"{module}.".startswith(f"{t}.") for module in modules))

    @property
    def miswired(self) -> bool:
        """True if the step runs and all its errors are about wiring, such as tokens that reach the wrong labels."""
        return bool(self.errors) and all(finding.kind == "wiring" for finding in self.errors)

    @property
    def ranges(self) -> Known | None:
        """Source of a float16 step's value ranges: measured, published for the model's family, or unknown; None for other steps."""
        if not computes_float16(self.trace):
            return None
        if self.trace.setup.ranges is not None:
            return "measured"
        return "known" if self.trace.setup.family_ranges else "unknown"

    @property
    def largest(self) -> Held | None:
        """Largest measured value that the forward computes in float16, or None if values were not measured."""
        return largest(self.trace)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Operators that were not measured on the device and whose operands the rule of their family refuses."""
        breaches = ((call.op, call.breach) for call in self.trace.breaches())
        return tuple(sorted({op for op, breach in breaches if breach is not None and breach.assumed}))


Outlook = Literal["repair", "unsafe", "untried", "caller", "left"]


def repair_outlook(report: Record) -> dict[Outlook, tuple[Finding, ...]]:
    """Group the errors and warnings by who can apply their first fix.

    `isotype.repair` applies the fixes in group `repair`, and with `unsafe=True` also those in group `unsafe`. The user
    has to apply the fixes in group `caller`. The fixes in group `untried` were not verified by a second trace. No fix
    is known for the findings in group `left`.
    """
    outlooks: dict[Outlook, list[Finding]] = {kind: [] for kind in get_args(Outlook)}
    for finding in (*report.errors, *report.warnings):
        outlooks[_outlook(finding)].append(finding)
    return {kind: tuple(findings) for kind, findings in outlooks.items()}


def _outlook(finding: Finding) -> Outlook:
    if not finding.fixes:
        return "left"
    first = finding.fixes[0]
    if first.scope == "advice" or (first.verified and first.scope != "model"):
        return "caller"
    if not first.verified:
        return "untried"
    return "repair" if first.safety == "safe" else "unsafe"
