"""repair: apply to the real model the fixes that a second trace has proven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from isotype.errors import Problem, UsageError
from isotype.fixes.apply import Undo, apply_actions, take_back
from isotype.report.check import Report
from isotype.rules import clears
from isotype.rules.finding import Action, Finding, Fix


@dataclass(frozen=True)
class Repairs:
    """What was done to a model; iterating gives the fixes.

    Attributes:
        fixes: applied, in order.
        settings: arguments of the step that have to change with them, by name (`autocast`, `scaler`, …): only the
            caller can do that.
        left: findings that no fix was applied for, each with the reason.
    """

    fixes: tuple[Fix, ...]
    settings: dict[str, str]
    left: tuple[tuple[Finding, str], ...]
    _undos: list[Undo] = field(default_factory=list, repr=False, compare=False)

    def undo(self) -> None:
        """Take everything back: the model is as it was before `repair`."""
        take_back(self._undos)

    def __iter__(self) -> Iterator[Fix]:
        return iter(self.fixes)

    def __len__(self) -> int:
        return len(self.fixes)

    def __str__(self) -> str:
        lines = [f"done      {fix.description}" for fix in self.fixes]
        lines += [f"set       {name}={value}" for name, value in self.settings.items()]
        lines += [f"left      {finding.code}: {finding.message}: {reason}" for finding, reason in self.left]
        return "\n".join(lines) or "nothing to repair"


def repair(model: nn.Module, report: Report, unsafe: bool = False) -> Repairs:
    """Apply verified fixes to `model` in place, cheapest first, until the report's findings are gone.

    Fixes are chosen one finding at a time, errors first; after each the step is traced again with all fixes so far,
    so that what one fix clears on the way is not fixed twice, and fixes that work alone but not together are not
    applied together.

    Args:
        model: the model that was checked.
        report: from `isotype.check(model, …)`.
        unsafe: also fixes that change stored digits or the meaning of the step.

    Raises:
        UsageError: the report carries no step to trace again, or is of another model. The model is then unchanged.
    """
    if report.again is None:
        raise UsageError(
            "this report cannot be repaired from",
            [
                Problem(
                    f"a report of {report.trace.model} without its step",
                    "the report that isotype.check(model, …) returned in this process",
                    "call isotype.check again",
                )
            ],
        )
    chosen, left = plan(report, unsafe)
    undos = apply_actions(model, [action for fix in chosen for action in fix.actions])
    settings = {a.target: a.value for fix in chosen for a in fix.actions if a.kind == "setting"}
    return Repairs(tuple(chosen), settings, tuple(left), undos)


def plan(report: Report, unsafe: bool = False) -> tuple[list[Fix], list[tuple[Finding, str]]]:
    """The fixes that together clear the most findings of `report`, and what they leave with the reason."""
    assert report.again is not None
    chosen: list[Fix] = []
    left: list[tuple[Finding, str]] = []
    present = report.findings
    for finding in report.findings:
        there = any((each.code, each.cause) == (finding.code, finding.cause) for each in present)
        if not there or finding.severity == "note":
            continue
        fix, after = _first_that_works(report, finding, chosen, present, unsafe)
        if fix is None:
            left.append((finding, _reason(finding, unsafe)))
        else:
            chosen.append(fix)
            present = after
    return chosen, left


def _first_that_works(
    report: Report, finding: Finding, chosen: Sequence[Fix], present: tuple[Finding, ...], unsafe: bool
) -> tuple[Fix | None, tuple[Finding, ...]]:
    assert report.again is not None
    for fix in finding.fixes:
        if not fix.verified or (fix.safety == "unsafe" and not unsafe):
            continue
        actions: list[Action] = [action for each in (*chosen, fix) for action in each.actions]
        after = report.again(actions)
        if clears(finding, present, after):
            return fix, after
    return None, present


def _reason(finding: Finding, unsafe: bool) -> str:
    if not finding.fixes:
        return "no fix is known"
    verified = [fix for fix in finding.fixes if fix.verified]
    if verified and not unsafe and all(fix.safety == "unsafe" for fix in verified):
        return f"only an unsafe fix: {verified[0].description}; repair(…, unsafe=True) applies it"
    return f"yours to do: {finding.fixes[0].description}"
