"""The rules. Each file `ist###_….py` defines one rule: a function without side effects that takes a trace and returns findings."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import getsource

from isotype.core.dtypes import dtype_name
from isotype.core.errors import error_line
from isotype.core.source import line_of
from isotype.records.finding import SEVERITIES, Finding, Kind, by_preference
from isotype.records.trace import Trace
from isotype.rules.kit import contract_rule
from isotype.rules.kit.groups import rule_modules

FAMILIES: Mapping[str, tuple[str, Kind]] = {
    "IST1": ("operators that raise errors", "step"),
    "IST2": ("dtypes that cost time or memory", "step"),
    "IST3": ("trainable parameters, optimizer, loss scaling", "step"),
    "IST4": ("quantization state", "step"),
    "IST5": ("checkpoint, merge, export, resume", "step"),
    "IST6": ("hardware and versions", "device"),
    "IST7": ("distributed", "step"),
    "IST8": ("range and precision of values", "step"),
    "IST9": ("inputs and weights that affect the wrong outputs, or none", "wiring"),
}
"""Topic of each family of rules, and the kind of the family's findings. The codes of a family start with the same prefix."""


@dataclass(frozen=True)
class Rule:
    """A rule. The docstring of the rule's file, such as `rules/ist101_….py`, contains the title and the page of the
    rule.

    The file defines the function `find`. If all findings of the rule are about broken contracts, it may define only
    `CLAIMS`. If the file defines `KIND`, the findings have this kind; otherwise they have the kind of the rule's
    family.

    Attributes:
        code: code of the rule, `IST###`; the file's name contains it.
        title: headline of the rule's page, which is the first line of the docstring.
        page: the page in Markdown, without the headline.
        find: function that takes a trace and yields findings. Its documentation is the page of the rule.
        kind: kind of the findings, such as `"step"`, `"memory"` or `"device"`.
    """

    code: str
    title: str
    page: str
    find: Callable[[Trace], Iterable[Finding]]
    kind: Kind = "step"


@cache
def all_rules() -> tuple[Rule, ...]:
    rules = []
    for code, module in rule_modules().items():
        # `python -OO` removes docstrings.
        docstring = module.__doc__ or ast.get_docstring(ast.parse(getsource(module)), clean=False)
        title, _, text = str(docstring).partition("\n\n")
        of_claims = partial(contract_rule.find, module.__name__)
        find = getattr(module, "find", of_claims) if hasattr(module, "CLAIMS") else module.find
        rules.append(Rule(code, title, text.strip(), find, getattr(module, "KIND", FAMILIES[code[:4]][1])))
    return tuple(rules)


def by_family(rules: Sequence[Rule]) -> Iterator[tuple[str, str, list[Rule]]]:
    """Yield (code prefix, topic, rules of the family) for each family in `rules`."""
    for family, (about, _) in FAMILIES.items():
        some = [rule for rule in rules if rule.code.startswith(family)]
        if some:
            yield family, about, some


def page(rule: Rule) -> str:
    return f"# {rule.code}: {rule.title}\n\n{rule.page}\n"


def judge(trace: Trace) -> tuple[Finding, ...]:
    """Return the findings of all rules, sorted by severity (errors first) and then by code. Preferred fixes come first."""
    findings = [finding for rule in all_rules() for finding in _findings(rule, trace)]
    for dtype, reason in trace.reasons.items():
        about = re.compile(rf"\b(is|are|instead of) {dtype_name(dtype)}\b")
        findings = [
            replace(f, cause=f"{f.cause} ({reason})") if about.search(f"{f.message} {f.cause}") else f
            for f in findings
        ]
    findings = [replace(finding, fixes=by_preference(finding.fixes)) for finding in findings]
    return tuple(sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.code)))


def _findings(rule: Rule, trace: Trace) -> Iterator[Finding]:
    try:
        yield from (replace(finding, kind=rule.kind, code=rule.code) for finding in rule.find(trace))
    except Exception as error:  # noqa: BLE001 - the other rules' findings count; this failure is reported
        yield unjudged(f"the rule {rule.code} could not check the step", error, f"{rule.code}: ")


def unjudged(what: str, error: Exception, whose: str = "") -> Finding:
    """Return a finding which states that a part of the check failed with `error`.

    The message of the finding starts with `what`, the name of the failed part. The cause of the finding is `whose`,
    followed by the error.
    """
    raised = error_line(error)
    code = next(rule.code for rule in all_rules() if rule.kind == "untraced")
    message = f"{what}, because {raised}"
    cause = f"{whose}{raised}"
    return Finding("warning", message, source=line_of(error), cause=cause, kind="untraced", code=code)


def resolves(
    finding: Finding, before: Sequence[Finding], after: Sequence[Finding], costly: bool = False
) -> bool:
    """Return True if a fix removed `finding` and caused no new errors and no new warnings.

    If `finding` says that a part was not checked, new warnings are accepted, because they may come from the part that
    the fix makes accessible. If `costly` is true, new warnings about the step are accepted, because a slow step is
    better than an error.
    """
    errors = {(other.code, other.cause) for other in before if other.severity == "error"}
    known = {(other.code, other.cause) for other in before}
    codes = {other.code for other in before}
    place = (finding.code, finding.module, finding.op, finding.source)
    allowed = finding.kind == "untraced" or costly
    return not any(
        (new.code, new.cause) == (finding.code, finding.cause)
        # The operator still has this problem, but now another cause is reported.
        or ((new.code, new.module, new.op, new.source) == place and (new.code, new.cause) not in known)
        or (new.severity == "error" and (new.code, new.cause) not in errors)
        or (new.code not in codes and (not allowed or new.kind == "untraced"))
        for new in after
        if new.severity != "note"
    )
