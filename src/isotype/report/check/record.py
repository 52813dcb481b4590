"""The result of a check as data, read by its writers (text, JSON, SARIF, HTML)."""

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
    """A traced and judged step.

    Attributes:
        trace: the step on fake tensors, before any fix.
        findings: errors first, then by code.
        seconds: wall-clock time of the whole check.
        again: traces the same step with actions applied and judges it; None if the report was read from a file.
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
        """Findings that cost nothing."""
        return self._of("note")

    @property
    def ok(self) -> bool:
        """True without error findings; `complete` is true if the step was traced to its end."""
        return not self.errors

    @property
    def complete(self) -> bool:
        """True if the step was traced to its end; operators after `trace.failure` were not judged."""
        return self.trace.failure is None

    @property
    def memory(self) -> Memory:
        """Bytes alive at the peak of each phase, by kind."""
        return self.trace.memory

    @property
    def flops(self) -> dict[torch.dtype, int]:
        """FLOPs of the matmul-like operators of one step by compute dtype."""
        return self.trace.flops

    @property
    def time(self) -> StepTime | None:
        """Least time of the step by the device's data sheet, and its parts; None if unknown."""
        return step_time(self.trace)

    @property
    def fits(self) -> bool | None:
        """True if the peak is at most what a step may take of the device's memory; None if either is unknown."""
        limit, peak = self.trace.setup.limit, self.memory.peak
        return None if limit.size is None or not peak else limit.holds(peak)

    @property
    def status(self) -> Status:
        """The worst known result, in one word."""
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
        """Towers of the model that the step does not use, since its inputs have no picture or no sound."""
        towers = self.trace.setup.towers
        if not towers:
            return ()
        modules = {plain_name(call.module) for call in self.trace.calls}
        return tuple(t for t in towers if not any(f"{module}.".startswith(f"{t}.") for module in modules))

    @property
    def miswired(self) -> bool:
        """True if the step runs and its only errors are about wiring."""
        return bool(self.errors) and all(finding.kind == "wiring" for finding in self.errors)

    @property
    def ranges(self) -> Known | None:
        """Source of a float16 step's value ranges: measured, published for the family, or unknown; else None."""
        if not computes_float16(self.trace):
            return None
        if self.trace.setup.ranges is not None:
            return "measured"
        return "known" if self.trace.setup.family_ranges else "unknown"

    @property
    def largest(self) -> Held | None:
        """Largest measured value that the forward computes in float16; None if not measured."""
        return largest(self.trace)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Operators whose broken contract was taken from their family's rule, not measured on the device."""
        operators = (
            call.op for call in self.trace.breaches() if call.breach is not None and call.breach.assumed
        )
        return tuple(sorted(set(operators)))


Outlook = Literal["repair", "unsafe", "untried", "caller", "left"]


def repair_outlook(report: Record) -> dict[Outlook, tuple[Finding, ...]]:
    """Group the errors and warnings by what resolves them with their first fix, each tried alone.

    `repair`: `isotype.repair` by a change of the model; `unsafe`: the same with `unsafe=True`; `caller`: a setting, a
    line of code or advice; `untried`: fixes not tried in a second trace; `left`: no known fix.
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
