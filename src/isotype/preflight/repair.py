"""`isotype.repair`: applies fixes to the real model. A trace of the repaired step has verified each fix."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from isotype.core.errors import UsageError
from isotype.core.names import plural
from isotype.preflight.apply import Undo, apply_actions, take_back
from isotype.records.finding import Action, Finding, Fix, by_preference, marked
from isotype.report.check.report import Report


@dataclass(frozen=True)
class Repairs:
    """The fixes that `repair` has chosen, and the remaining findings. Iteration yields the fixes.

    Attributes:
        fixes: the fixes that resolve the findings together, in the order in which they were chosen.
        settings: argument of the step (`autocast`, `scaler`, …) -> the new value that the caller has to set.
        lines: `file:line` of the code -> the dtype that the caller has to write in this line.
        left: findings that no fix resolves, each with the reason.
        resolved: findings that the repaired model no longer has.
        pending: findings that the caller resolves by the changes in `settings` and `lines`.
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
        """The fixes that `repair` has applied completely."""
        return tuple(fix for fix in self.fixes if not needs_the_caller(fix))

    @property
    def to_do(self) -> tuple[Fix, ...]:
        """The fixes that the caller has to apply or complete, by changing a setting or a line."""
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
        counts = {
            "resolved": len(self.resolved),
            "resolved after the changes above": len(self.pending),
            "left": len(self.left),
        }
        total = sum(counts.values())
        parts = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        lines += [f"total     {plural(total, 'finding')}: {parts}"] if total else []
        return "\n".join(lines) or "nothing to repair"


def repair(model: nn.Module, report: Report, unsafe: bool = False) -> Repairs:
    """Apply verified fixes to `model` in place, the cheapest first, until the report's findings are resolved.

    `repair` chooses a fix for one finding after another, and begins with the errors. After each choice, it traces the
    step with all chosen fixes. Therefore `repair` fixes no finding twice, and combines only fixes that work together.

    Args:
        model: the model that was checked.
        report: from `isotype.check(model, …)`.
        unsafe: True to allow fixes that change stored digits or the meaning of the step.

    Raises:
        UsageError: the report contains no step that can be traced again, or is about another model. The model stays unchanged.
    """
    if report.again is None:
        what, fix = f"a report of {report.trace.model} without the checked step", "call isotype.check again"
        expected = "the report that isotype.check(model, …) returned in this process"
        raise UsageError.of("this report cannot be used for a repair", what, expected, fix)
    chosen, left = plan(report, unsafe)
    actions = [action for fix in chosen for action in fix.actions]
    undos = apply_actions(model, actions)
    settings = {a.target: a.value for a in actions if a.kind == "setting"}
    code = {a.target: a.value for a in actions if a.kind == "line"}
    resolved = _gone(report, [action for action in actions if action.scope == "model"])
    keys = {finding.key for finding in resolved}
    pending = tuple(finding for finding in _gone(report, actions) if finding.key not in keys)
    return Repairs(tuple(chosen), settings, code, tuple(left), resolved, pending, undos)


def _gone(report: Report, actions: Sequence[Action]) -> tuple[Finding, ...]:
    if not actions:
        return ()
    assert report.again is not None
    after = faults(report.again(actions))
    return tuple(f for f in report.findings if f.severity != "note" and (f.code, f.cause) not in after)


def faults(findings: Iterable[Finding]) -> set[tuple[str, str]]:
    """Return (code, cause) of each finding. This pair identifies the finding in other traces of the model."""
    return {(finding.code, finding.cause) for finding in findings}


def plan(
    report: Report, unsafe: bool = False, *, command: bool = False
) -> tuple[list[Fix], list[tuple[Finding, str]]]:
    """Return the fixes that resolve the most findings of `report` together, and (finding, reason) for all other findings.

    After each fix, the step is checked again, because one cause can hide another cause.

    Args:
        command: True if the fixes are for the arguments of a training command. The model of a training command cannot be
            changed.
    """
    assert report.again is not None
    chosen: list[Fix] = []
    left: dict[tuple[str, str], tuple[Finding, str]] = {}
    fixed: set[tuple[str, str]] = set()
    tried = {(finding.code, finding.cause): finding for finding in report.findings}
    present: Sequence[Finding] = report.findings
    while unresolved := [f for f in present if f.severity != "note" and (f.code, f.cause) not in left]:
        finding = unresolved[0]
        key = (finding.code, finding.cause)
        if key in fixed:
            left[key] = (finding, "the fix of another finding causes this finding again")
            continue
        fix, after = _first_that_works(report, finding, chosen, present, unsafe, command)
        if fix is None:
            left[key] = (finding, _reason(tried.get(key, finding), unsafe))
        else:
            fixed.add(key)
            chosen.append(fix)
            present = after
    remaining = faults(present)
    return _needed(report, chosen, present), [pair for key, pair in left.items() if key in remaining]


def _needed(report: Report, chosen: list[Fix], after: Sequence[Finding]) -> list[Fix]:
    """Return the chosen fixes without fixes that later fixes replace. The argument `after` contains the findings with all chosen fixes."""
    assert report.again is not None
    present = faults(finding for finding in after if finding.severity != "note")
    needed = list(chosen)
    for position, fix in enumerate(chosen):
        if all(map(needs_the_caller, chosen[position + 1 :])):
            break  # a change that the caller still has to make replaces no fix
        rest = [other for other in needed if other is not fix]
        try:
            findings = report.again([action for other in rest for action in other.actions])
        except UsageError:
            continue  # a later fix depends on `fix`
        if faults(finding for finding in findings if finding.severity != "note") <= present:
            needed = rest
    return needed


def _first_that_works(
    report: Report,
    finding: Finding,
    chosen: Sequence[Fix],
    present: Sequence[Finding],
    unsafe: bool,
    command: bool,
) -> tuple[Fix | None, Sequence[Finding]]:
    assert report.again is not None
    has_unsafe = any(_is_excluded(fix, unsafe) and fix.works for fix in finding.fixes)
    for fix in by_preference(finding.fixes, unsafe=unsafe, command=command):
        if _is_excluded(fix, unsafe) or not _may_be_applied(fix, command) or fix in chosen:
            continue
        if fix.scope == "library" and has_unsafe:
            continue  # an edit of a library is the last choice, after unsafe fixes
        if finding.severity != "error" and needs_the_caller(fix) and not command:
            continue  # a model that works must not depend on arguments that the caller may forget to change
        try:
            after = report.again([action for part in (*chosen, fix) for action in part.actions])
        except UsageError:
            continue  # this model lacks a target of the fix
        if _is_progress(finding, present, after):
            return replace(fix, verified=True), after
    return None, present


def needs_the_caller(fix: Fix) -> bool:
    """Return True if a part of a fix is outside of the model: an argument of the step, or a line of code."""
    return fix.scope != "model"


def _is_excluded(fix: Fix, unsafe: bool) -> bool:
    return fix.safety == "unsafe" and not unsafe


def _may_be_applied(fix: Fix, command: bool) -> bool:
    # Advice is text for people. The user decides the compute dtype of a step: only a command may change it.
    decisions = any(action.kind == "setting" and action.target == "compute" for action in fix.actions)
    return fix.scope != "advice" and not (decisions and not command)


def _is_progress(finding: Finding, before: Sequence[Finding], after: Sequence[Finding]) -> bool:
    """Return True if a fix resolved the finding, added no error, and did not end the trace early."""
    if (finding.code, finding.cause) in faults(after):
        return False
    if "untraced" in {f.kind for f in after} - {f.kind for f in before}:
        return False
    return sum(f.severity == "error" for f in after) <= sum(f.severity == "error" for f in before)


def unresolved(report: Report) -> list[tuple[Finding, str]]:
    return [(finding, _reason(finding, False)) for finding in report.findings if finding.severity != "note"]


def _reason(finding: Finding, unsafe: bool) -> str:
    if not finding.fixes:
        return "no known fix works"
    fixes = by_preference(finding.fixes, unsafe=unsafe)
    proven = next((fix for fix in fixes if fix.works), None)
    if proven is not None and _is_excluded(proven, unsafe):
        return (
            f"only an unsafe fix resolves it: {proven.description}; repair(…, unsafe=True) applies this fix"
        )
    if proven is not None and not needs_the_caller(proven):
        return f"this fix works alone, but not together with the other fixes: {proven.description}"
    if proven is None and finding.severity != "error":
        proven = next((fix for fix in fixes if needs_the_caller(fix)), None)  # for a warning it was not tried
    advised = proven or next((fix for fix in fixes if fix.scope == "advice"), None)
    if advised is None:
        return "no tried fix resolves this finding"
    text = f"{advised.description} (the command above)" if advised.command else marked(advised)
    return f"yours to do: {text}"
