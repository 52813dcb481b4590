"""The result of a check as data. Other modules write this data as text, JSON, SARIF and HTML."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from isotype.core.names import grouped
from isotype.records.finding import Action, Finding, Severity
from isotype.records.memory import Memory, StepTime
from isotype.records.trace import Trace
from isotype.rules.kit.costs import step_time
from isotype.rules.kit.value_ranges import Float16Value, computes_float16, largest
from isotype.rules.kit.weight_sets import unseen_towers

Again = Callable[[Sequence[Action]], tuple[Finding, ...]]
Status = Literal["fails", "does not fit", "unknown", "costs", "unmeasured", "partial", "clean"]
Known = Literal["measured", "known", "unknown"]


@dataclass(frozen=True)
class Record:
    """The result of a check: the trace of a training step, and the findings of the rules.

    Attributes:
        trace: trace of the step on fake tensors, before any fix.
        findings: findings of the rules, sorted by severity (errors first) and then by code.
        seconds: wall-clock time of the whole check, in seconds.
        again: function that applies fixes, traces the step again and returns the findings. None if the report was read from a
            file.
    """

    trace: Trace
    findings: tuple[Finding, ...]
    seconds: float = 0.0
    again: Again | None = field(default=None, repr=False, compare=False)

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings about a step that crashes or has a wrong result."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings about a step that runs, but loses speed, memory or precision."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings that cost no speed, memory or precision."""
        return self._of("note")

    @property
    def ok(self) -> bool:
        """True if no finding is an error. The trace may have ended early (see `complete`)."""
        return not self.errors

    @property
    def complete(self) -> bool:
        """True if the step was traced to its end. If False, operators after an error were not checked."""
        return self.trace.failure is None

    @property
    def memory(self) -> Memory:
        """Allocated bytes of each kind of tensor at each phase's memory peak."""
        return self.trace.memory

    @property
    def flops(self) -> dict[torch.dtype, int]:
        """FLOPs of the matmul-like operators of one step, by compute dtype."""
        return self.trace.flops

    @property
    def operators(self) -> int:
        """Number of operators in a step of the whole model. A trace with folded layers contains fewer operators."""
        return sum(call.repeats for call in self.trace.calls)

    @property
    def time(self) -> StepTime | None:
        """Lower bound of the step's time by the device's published rates; None without published rates or if the trace ended early."""
        return step_time(self.trace)

    @property
    def fits(self) -> bool | None:
        """True if the step's peak memory is within the device's limit. None if the peak or the limit is unknown."""
        limit, peak = self.trace.setup.limit, self.memory.peak
        return None if limit.size is None or not peak else limit.holds(peak)

    @property
    def status(self) -> Status:
        """The check's result in a word: the most severe word that applies."""
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
        return "partial" if self.unseen or self.trace.untraced else "clean"

    @property
    def unseen(self) -> tuple[str, ...]:
        """Vision and audio towers that the step does not use, because its inputs have no image or audio."""
        return unseen_towers(self.trace)

    @property
    def miswired(self) -> bool:
        """True if the step runs, and all its errors are of the kind "wiring" (IST9xx), such as tokens with wrong labels."""
        return bool(self.errors) and all(finding.kind == "wiring" for finding in self.errors)

    @property
    def ranges(self) -> Known | None:
        """Source of the value ranges in float16: measured, known for the model's family, or unknown. None for a step without float16."""
        if not computes_float16(self.trace):
            return None
        if self.trace.setup.ranges is not None:
            return "measured"
        return "known" if self.trace.setup.family_ranges else "unknown"

    @property
    def largest(self) -> Float16Value | None:
        """The largest value that was measured in a float16 tensor of the forward. None without a measurement."""
        return largest(self.trace)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Operators that are assumed to refuse their operands' dtypes, because only similar operators were measured."""
        breaches = ((call.op, call.breach) for call in self.trace.breaches())
        return tuple(sorted({op for op, breach in breaches if breach is not None and breach.assumed}))


Outlook = Literal["repair", "unsafe", "untried", "caller", "left"]


def repair_outlook(report: Record) -> dict[Outlook, tuple[Finding, ...]]:
    """Count the errors and warnings by their first fix.

    `repair`: `isotype.repair` applies the fix. `unsafe`: `isotype.repair` applies the fix with `unsafe=True`. `caller`:
    the user applies the fix. `untried`: the fix was not verified. `left`: no known fix works.
    """
    outlooks = grouped((*report.errors, *report.warnings), _outlook)
    return {kind: tuple(outlooks.get(kind, ())) for kind in get_args(Outlook)}


def _outlook(finding: Finding) -> Outlook:
    if not finding.fixes:
        return "left"
    first = finding.fixes[0]
    if first.scope == "advice" or (first.works and first.scope != "model"):
        return "caller"
    if not first.works:
        return "untried"
    return "repair" if first.safety == "safe" else "unsafe"
