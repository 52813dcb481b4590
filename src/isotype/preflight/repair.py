"""`isotype.repair`: applies fixes verified by a second trace to the real model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from isotype.core.errors import UsageError
from isotype.core.names import plural
from isotype.preflight.apply import Undo, apply_actions, take_back
from isotype.records.finding import Action, Finding, Fix, by_preference, marked
from isotype.report.check.report import Report


@dataclass(frozen=True)
class Repairs:
    """Fixes applied to a model, and remaining ones; iterates over all fixes.

    Attributes:
        fixes: in order, which together resolve the findings; applied if they change only the model.
        settings: arguments of the step that the caller has to change too, by name (`autocast`, `scaler`,
            …).
        lines: lines of code that the caller has to change too, `file:line` -> dtype.
        left: findings without a fix, each with the reason.
        resolved: findings the repaired model no longer has.
        pending: findings that disappear once the caller has changed `settings` and `lines`.
    """

    fixes: tuple[Fix, ...]
    settings: dict[str, str]
    lines: dict[str, str]
    left: tuple[tuple[Finding, str], ...]
    resolved: tuple[Finding, ...] = ()
    pending: tuple[Finding, ...] = ()
    _undos: list[Undo] = field(default_factory=list, repr=False, compare=False)

    @property
    def done(self) -> tuple[Fix, ...]:
        """The fixes that `repair` applied completely."""
        return tuple(fix for fix in self.fixes if not needs_the_caller(fix))

    @property
    def to_do(self) -> tuple[Fix, ...]:
        """The fixes that the caller has to apply, or to complete by a setting."""
        return tuple(fix for fix in self.fixes if needs_the_caller(fix))

    def undo(self) -> None:
        """Undo all changes of `repair`."""
        take_back(self._undos)

    def __iter__(self) -> Iterator[Fix]:
        return iter(self.fixes)

    def __len__(self) -> int:
        return len(self.fixes)

    def __str__(self) -> str:
        lines = [f"done      {fix.description}" for fix in self.done]
        lines += [f"to do     {marked(fix)}" for fix in self.to_do]
        lines += [f"set       {name}={value}" for name, value in self.settings.items()]
        lines += [f"edit      {source}: {value}" for source, value in self.lines.items()]
        lines += [f"left      {finding.code}: {finding.message}: {reason}" for finding, reason in self.left]
        counted = (
            (self.resolved, "resolved"),
            (self.pending, "resolved once you have done the above"),
            (self.left, "left"),
        )
        total = sum(len(some) for some, _ in counted)
        parts = ", ".join(f"{len(some):,} {what}" for some, what in counted if some)
        lines += [f"in all    {plural(total, 'finding')}: {parts}"] if total else []
        return "\n".join(lines) or "nothing to repair"


def repair(model: nn.Module, report: Report, unsafe: bool = False) -> Repairs:
    """Apply verified fixes to `model` in place, cheapest first, until the report's findings are gone.

    Fixes are chosen one finding at a time, errors first. After each choice the step is traced with all chosen
    fixes, so that a finding already resolved is not fixed twice, and fixes that only work alone are not
    combined.

    Args:
        model: the model that was checked.
        report: from `isotype.check(model, …)`.
        unsafe: also apply fixes that change stored digits or the meaning of the step.

    Raises:
        UsageError: the report has no step to trace again, or is of another model. The model stays
            unchanged.
    """
    if report.again is None:
        raise UsageError.of(
            "this report cannot be repaired from",
            f"a report of {report.trace.model} without its step",
            "the report that isotype.check(model, …) returned in this process",
            "call isotype.check again",
        )
    chosen, left = plan(report, unsafe)
    actions = [action for fix in chosen for action in fix.actions]
    undos = apply_actions(model, actions)
    settings = {a.target: a.value for a in actions if a.kind == "setting"}
    code = {a.target: a.value for a in actions if a.kind == "line"}
    resolved = _gone(report, [action for action in actions if action.scope == "model"])
    known = {finding.key for finding in resolved}
    pending = tuple(finding for finding in _gone(report, actions) if finding.key not in known)
    return Repairs(tuple(chosen), settings, code, tuple(left), resolved, pending, undos)


def _gone(report: Report, actions: Sequence[Action]) -> tuple[Finding, ...]:
    """Return the findings of `report`, without notes, that a step with `actions` no longer has."""
    if not actions:
        return ()
    assert report.again is not None
    after = {(each.code, each.cause) for each in report.again(actions)}
    return tuple(f for f in report.findings if f.severity != "note" and (f.code, f.cause) not in after)


def plan(
    report: Report, unsafe: bool = False, *, command: bool = False
) -> tuple[list[Fix], list[tuple[Finding, str]]]:
    """Return the fixes that together resolve the most findings of `report`, and the remaining findings with
    the reason.

    Findings after a fix are considered again, since one cause can hide another. Each finding gets one turn,
    so each is resolved or left.

    Args:
        report: of a step that can be traced again.
        unsafe: also choose fixes that change stored digits or the meaning of the step.
        command: whether a training command is repaired, by its arguments.
    """
    assert report.again is not None
    chosen: list[Fix] = []
    left: dict[tuple[str, str], tuple[Finding, str]] = {}
    fixed: set[tuple[str, str]] = set()
    tried = {(each.code, each.cause): each for each in report.findings}
    present: Sequence[Finding] = report.findings
    while open_ones := [f for f in present if f.severity != "note" and (f.code, f.cause) not in left]:
        finding = open_ones[0]
        key = (finding.code, finding.cause)
        if key in fixed:
            left[key] = (finding, "it comes back with the fix of another finding")
            continue
        fix, after = _first_that_works(report, finding, chosen, present, unsafe, command)
        if fix is None:
            left[key] = (finding, _reason(tried.get(key, finding), unsafe))
        else:
            fixed.add(key)
            chosen.append(fix)
            present = after
    still = {(each.code, each.cause) for each in present}
    return _needed(report, chosen, present), [each for key, each in left.items() if key in still]


def _needed(report: Report, chosen: list[Fix], after: Sequence[Finding]) -> list[Fix]:
    """Return the fixes without those that a later fix of the underlying cause makes superfluous."""
    assert report.again is not None
    present = {(each.code, each.cause) for each in after if each.severity != "note"}
    kept = list(chosen)
    for position, fix in enumerate(chosen):
        if all(needs_the_caller(later) for later in chosen[position + 1 :]):
            break  # changes that the caller still has to make replace no fix
        rest = [each for each in kept if each is not fix]
        try:
            findings = report.again([action for each in rest for action in each.actions])
        except UsageError:
            continue  # a later fix depends on it
        if all((each.code, each.cause) in present for each in findings if each.severity != "note"):
            kept = rest
    return kept


def _first_that_works(
    report: Report,
    finding: Finding,
    chosen: Sequence[Fix],
    present: Sequence[Finding],
    unsafe: bool,
    command: bool,
) -> tuple[Fix | None, Sequence[Finding]]:
    assert report.again is not None
    unasked = any(_is_unasked(fix, unsafe) and fix.verified for fix in finding.fixes)
    for fix in by_preference(finding.fixes, unsafe=unsafe, command=command):
        if _is_unasked(fix, unsafe) or not _may_be_applied(fix, command) or fix in chosen:
            continue
        if fix.scope == "library" and unasked:
            continue  # an edit of a library is the last choice, after unsafe fixes
        if finding.severity != "error" and needs_the_caller(fix) and not command:
            continue  # a working model must not depend on arguments that the caller may forget to change
        actions: list[Action] = [action for each in (*chosen, fix) for action in each.actions]
        try:
            after = report.again(actions)
        except UsageError:
            continue  # a target that this model lacks
        if _is_progress(finding, present, after):
            return replace(fix, verified=True), after
    return None, present


def needs_the_caller(fix: Fix) -> bool:
    """Return whether a part of a fix is outside the model: an argument of the step, or a line of code."""
    return fix.scope != "model"


def _is_unasked(fix: Fix, unsafe: bool) -> bool:
    return fix.safety == "unsafe" and not unsafe


def _may_be_applied(fix: Fix, command: bool) -> bool:
    # The compute dtype of a step is a decision, not a repair of a model; advice is for people.
    decisions = any(action.kind == "setting" and action.target == "compute" for action in fix.actions)
    return fix.scope != "advice" and not (decisions and not command)


def _is_progress(finding: Finding, before: Sequence[Finding], after: Sequence[Finding]) -> bool:
    """Return whether the finding is gone without more errors; one error may reveal another.

    False if the step is no longer traced to its end, which hides findings.
    """
    if any((each.code, each.cause) == (finding.code, finding.cause) for each in after):
        return False
    if any(each.kind == "untraced" for each in after) and not any(each.kind == "untraced" for each in before):
        return False
    errors = sum(each.severity == "error" for each in before)
    new_errors = sum(each.severity == "error" for each in after)
    return new_errors <= errors - (finding.severity == "error") or (
        finding.severity == "error" and new_errors <= errors
    )


def _reason(finding: Finding, unsafe: bool) -> str:
    if not finding.fixes:
        return "no fix is known"
    fixes = by_preference(finding.fixes, unsafe=unsafe)
    proven = next((fix for fix in fixes if fix.verified), None)
    if proven is not None and _is_unasked(proven, unsafe):
        return f"only an unsafe fix: {proven.description}; repair(…, unsafe=True) applies it"
    if proven is not None and not needs_the_caller(proven):
        return f"resolved alone, but not together with the other fixes, by: {proven.description}"
    if proven is None and finding.severity != "error":
        proven = next((fix for fix in fixes if needs_the_caller(fix)), None)  # not tried for a warning
    yours = proven or next((fix for fix in fixes if fix.scope == "advice"), None)
    if yours is None:
        return "no fix that was tried resolves it"
    return f"yours to do: {f'{yours.description} (the command above)' if yours.command else marked(yours)}"
