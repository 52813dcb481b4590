"""What `isotype check` found, as data: the frozen report, its verdict and its JSON form. Renderers read it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from isotype.contracts.contract import doubts
from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError, Problem, SaveError
from isotype.core.terminal import as_typed
from isotype.rules.finding import Action, Finding, Fix, Price, Severity, marked
from isotype.trace.record import Memory, Operand, Setup, Trace

SCHEMA_VERSION = 1
"""Version of the JSON form; it grows when a reader of the former version would misread the new one."""

Again = Callable[[Sequence[Action]], tuple[Finding, ...]]
Status = Literal["fails", "does not fit", "unknown", "costs", "clean"]


@dataclass(frozen=True)
class Report:
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
        """Whether there is no error finding; `complete` says whether the step was followed to its end."""
        return not self.errors

    @property
    def complete(self) -> bool:
        """Whether the step was followed to its end: what lies behind `trace.failure` was not judged."""
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
    def fits(self) -> bool | None:
        """Whether the peak fits into the device's memory; None where its size or the peak is not known."""
        capacity = self.trace.setup.profile.memory_bytes
        return None if capacity is None or not self.memory.peak else self.memory.peak <= capacity

    @property
    def status(self) -> Status:
        """The one word of the verdict: the worst that is known."""
        if any(finding.code != "IST605" for finding in self.errors):
            return "fails"
        if self.errors or self.fits is False:
            return "does not fit"
        if not self.complete:
            return "unknown"
        return "costs" if self.warnings else "clean"

    @property
    def assumed(self) -> tuple[str, ...]:
        """Operators whose contract was broken but was taken from their family's rule, not measured on the device."""
        found = (call.op for call in self.trace.breaches() if call.breach is not None and call.breach.assumed)
        return tuple(sorted(set(found)))

    def raise_for_errors(self) -> None:
        """Nothing where `ok`.

        Raises:
            PrecisionError: one problem an error finding: what was given, what was expected, the first fix.
        """
        error = self.error()
        if error is not None:
            raise error

    def error(self) -> PrecisionError | None:
        """What `raise_for_errors` raises; None where `ok`."""
        if not self.errors:
            return None
        from isotype.report.check.text import verdict

        problems = [_problem(finding, self.trace.setup) for finding in self.errors]
        hint = f"print(report) shows the operands; isotype explain {self.errors[0].code} says more"
        return PrecisionError(verdict(self), problems, hint)

    def to_json(self) -> str:
        """Strict JSON; `schema_version` says which schema. Bytes, FLOPs, shares and seconds stay unrounded numbers."""
        return json.dumps(_encode(self), indent=1, allow_nan=False) + "\n"

    def to_sarif(self) -> str:
        """A SARIF 2.1.0 log with one run, for code scanning and editors."""
        from isotype.report.check.sarif import to_sarif

        return to_sarif(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one HTML file that needs no other; the former file stays until the new one is whole.

        Raises:
            SaveError: the file cannot be written.
        """
        from isotype.report.check.html import to_html

        return write(Path(path), to_html(self))

    def __str__(self) -> str:
        from isotype.report.check.text import to_text

        return to_text(self)


Outlook = Literal["repair", "unsafe", "untried", "caller", "left"]


def repair_outlook(report: Report) -> dict[Outlook, tuple[Finding, ...]]:
    """The errors and warnings by who resolves them with their first fix, each tried alone.

    `repair`: `isotype.repair` by a change of the model; `unsafe`: the same where it is asked for; `caller`: a setting,
    a line or advice; `untried`: fixes that no second trace has tried; `left`: no fix is known.
    """
    found: dict[Outlook, list[Finding]] = {kind: [] for kind in get_args(Outlook)}
    for finding in (*report.errors, *report.warnings):
        found[_outlook(finding)].append(finding)
    return {kind: tuple(some) for kind, some in found.items()}


def _outlook(finding: Finding) -> Outlook:
    if not finding.fixes:
        return "left"
    first = finding.fixes[0]
    if first.scope == "advice" or (first.verified and first.scope != "model"):
        return "caller"
    if not first.verified:
        return "untried"
    return "repair" if first.safety == "safe" else "unsafe"


def write(path: Path, text: str) -> Path:
    """Write a report under a temporary name, then move it into place.

    Raises:
        SaveError: the file cannot be written; a former one is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(as_typed(text), encoding="utf-8", newline="\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        problem = Problem(
            f"{path}: {error.strerror or error}",
            "a path that can be written to, with room for the report",
            "free the path or give another one",
        )
        raise SaveError("the report could not be written", [problem]) from error
    return path


def _problem(finding: Finding, setup: Setup) -> Problem:
    place = ", ".join(part for part in (finding.module, finding.op, finding.phase) if part)
    because = f" (cause: {finding.cause})" if finding.cause else ""
    wanted = f"operands that {finding.op} accepts" if finding.op else f"a {finding.phase} that runs"
    return Problem(
        f"{finding.code}: {finding.message}, at {place}{because}",
        f"{wanted} on {setup.profile.title}",
        marked(finding.fixes[0]) if finding.fixes else f"see isotype explain {finding.code}",
    )


# --- JSON -------------------------------------------------------------------------------------------------


def _encode(report: Report) -> dict[str, Any]:
    from isotype import __version__
    from isotype.report.check.text import verdict

    trace, memory, failure = report.trace, report.memory, report.trace.failure
    return {
        "schema_version": SCHEMA_VERSION,
        "isotype": __version__,
        "model": trace.model,
        "ok": report.ok,
        "complete": report.complete,
        "fits": report.fits,
        "status": report.status,
        "verdict": verdict(report),
        "seconds": report.seconds,
        "setup": _setup(trace.setup),
        "findings": [_finding(finding) for finding in report.findings],
        "resolved_by": {kind: len(some) for kind, some in repair_outlook(report).items()},
        "memory": {
            "peak_bytes": memory.peak,
            "peak_phase": memory.peak_phase,
            "capacity_bytes": trace.setup.profile.memory_bytes,
            "phases": {phase: dict(kinds) for phase, kinds in memory.phases.items()},
        },
        "flops": {dtype_name(dtype): count for dtype, count in report.flops.items()},
        "operators": sum(call.repeats for call in trace.calls),
        "assumed": list(report.assumed),
        "doubts": doubts(trace.setup.profile),
        "not_followed": list(trace.notes),
        "failure": None
        if failure is None
        else {
            "phase": failure.phase,
            "module": failure.module,
            "source": failure.source,
            "error": failure.error,
            "dtype_related": failure.dtype_related,
        },
    }


def _setup(setup: Setup) -> dict[str, Any]:
    profile = setup.profile
    return {
        "device": {"name": profile.name, "title": profile.title, "memory_bytes": profile.memory_bytes},
        "autocast": None if setup.autocast is None else dtype_name(setup.autocast),
        "autocast_eval": setup.autocast_eval,
        "scaler": setup.scaler,
        "optimizer": setup.optimizer,
        "learning_rate": setup.learning_rate,
        "compute": dtype_name(setup.compute),
        "phases": list(setup.phases),
        "fsdp": setup.fsdp,
        "batch": {name: list(shape) for name, shape in setup.batch.items()},
        "details": list(setup.details),
        "data": setup.data,
        "policy": None if setup.policy is None else setup.policy.to_dict(),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "message": finding.message,
        "module": finding.module,
        "op": finding.op,
        "phase": finding.phase,
        "source": finding.source,
        "cause": finding.cause,
        "evidence": list(finding.evidence),
        "notes": list(finding.notes),
        "operands": [_operand(operand) for operand in finding.operands],
        "places": list(finding.places),
        "price": None if finding.price is None else _price(finding.price),
        "fixes": [_fix(fix) for fix in finding.fixes],
    }


def _operand(operand: Operand) -> dict[str, Any]:
    origin = operand.origin
    return {
        "role": operand.role,
        "dtype": dtype_name(operand.dtype),
        "shape": list(operand.shape),
        "origin": {
            "kind": origin.kind,
            "name": origin.name,
            "module": origin.module,
            "source": origin.source,
        },
    }


def _price(price: Price) -> dict[str, Any]:
    return {
        "flops_share": price.flops_share,
        "cast_bytes": price.cast_bytes,
        "memory_bytes": price.memory_bytes,
        "slowdown": price.slowdown,
    }


def _fix(fix: Fix) -> dict[str, Any]:
    actions = [{"kind": a.kind, "target": a.target, "value": a.value} for a in fix.actions]
    return {
        "description": fix.description,
        "scope": fix.scope,
        "safety": fix.safety,
        "verified": fix.verified,
        "outcome": fix.outcome,
        "actions": actions,
    }
