"""JUDGE: one rule, one file; pure functions from a trace to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from isotype.core.errors import first_line
from isotype.core.source import line_of
from isotype.records.finding import SEVERITIES, Finding, Kind, by_preference
from isotype.records.trace import Trace
from isotype.rules.kit.claims import rule_modules

FAMILIES: Mapping[str, str] = {
    "IST1": "operands that crash",
    "IST2": "silent promotion and its cost",
    "IST3": "trainable parameters, optimizer, loss scaling",
    "IST4": "quantization state",
    "IST5": "checkpoint, merge, export, resume",
    "IST6": "hardware and versions",
    "IST7": "distributed",
    "IST8": "range",
    "IST9": "dependence: who reaches whom",
}
"""How a code begins -> what its rules are about."""


@dataclass(frozen=True)
class Rule:
    """A rule: the file `rules/ist101_….py` with `TITLE`, a docstring that is its page, and `find`.

    Findings are about the step unless the file says another `KIND`.

    Attributes:
        code: `IST###`, from the file's name.
        title: the headline of its page.
        page: its documentation (Markdown).
        find: from a trace to findings.
        kind: what its findings are about.
    """

    code: str
    title: str
    page: str
    find: Callable[[Trace], Iterable[Finding]]
    kind: Kind = "step"


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return every rule, by code."""
    return tuple(
        Rule(code, module.TITLE, module.__doc__ or "", module.find, getattr(module, "KIND", "step"))
        for code, module in rule_modules().items()
    )


def by_family(rules: Sequence[Rule]) -> Iterator[tuple[str, str, list[Rule]]]:
    """Yield (how their codes begin, what they are about, the rules) of each family that has any."""
    for family, about in FAMILIES.items():
        some = [rule for rule in rules if rule.code.startswith(family)]
        if some:
            yield family, about, some


def page(rule: Rule) -> str:
    """Return a rule's page as Markdown."""
    return f"# {rule.code}: {rule.title}\n\n{rule.page.strip()}\n"


def judge(trace: Trace) -> tuple[Finding, ...]:
    """What all rules find, errors first, then in order of the codes; the fixes of each in order of preference."""
    findings = [
        replace(finding, fixes=by_preference(finding.fixes))
        for rule in all_rules()
        for finding in _found(rule, trace)
    ]
    return tuple(sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.code)))


def _found(rule: Rule, trace: Trace) -> Iterator[Finding]:
    try:
        yield from (replace(finding, kind=rule.kind) for finding in rule.find(trace))
    except Exception as error:  # noqa: BLE001 - the other rules' findings count; this one's failure is told
        yield unjudged(f"the rule {rule.code} could not judge the step", error, f"{rule.code}: ")


def unjudged(what: str, error: Exception, whose: str = "") -> Finding:
    """Return the finding that a part of the check itself failed with `error`: `what` could not be done.

    Args:
        what: a sentence without its reason.
        error: what was raised.
        whose: written before it where the finding names its cause.
    """
    raised = f"{type(error).__name__}: {first_line(error)}"
    code = next(rule.code for rule in all_rules() if rule.kind == "untraced")
    return Finding(
        code,
        "warning",
        f"{what}, because {raised}",
        source=line_of(error),
        cause=f"{whose}{raised}",
        kind="untraced",
    )


def resolves(
    finding: Finding, before: Sequence[Finding], after: Sequence[Finding], costly: bool = False
) -> bool:
    """Return whether `finding` is gone and nothing new appeared: no error of another cause, no warning of
    another code.

    Where the step ended early, what comes after was not seen before: a step that now goes on may show its
    cost. With `costly` any cost is let pass: a step that runs at a cost is better than one that crashes; one
    that is no longer traced to its end is no such step.
    """
    errors = {(each.code, each.cause) for each in before if each.severity == "error"}
    codes = {each.code for each in before}
    allowed = finding.kind == "untraced" or costly
    return not any(
        (each.code, each.cause) == (finding.code, finding.cause)
        or (each.severity == "error" and (each.code, each.cause) not in errors)
        or (each.code not in codes and (not allowed or each.kind == "untraced"))
        for each in after
        if each.severity != "note"
    )
