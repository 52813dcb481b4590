"""The `find` of rules on broken contracts (IST1xx): from a group of breaches to a finding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import plural
from isotype.records.finding import Finding, Fix, places
from isotype.records.trace import FLOATS, Breach, Call, Failure, Origin, Trace, Weight
from isotype.rules.kit.contract_fixes import candidates
from isotype.rules.kit.groups import Group, all_claims, code_of, distinct, groups, sides_in
from isotype.rules.kit.words import cause_text, device_says, evidence


def contract_rule(
    module: str, headline: str, advise: Callable[[Finding], Fix] | None = None
) -> Callable[[Trace], Iterator[Finding]]:
    """Return the `find` of a rule on broken contracts: one finding per cause among its claims.

    Args:
        module: `__name__` of the rule's file.
        headline: may use {given} and {expected}, names of dtypes, and {op}.
        advise: returns a last fix for each finding.
    """
    code = code_of(module)

    def find(trace: Trace) -> Iterator[Finding]:
        """Yield this rule's broken contracts, by cause."""
        for group in groups(trace):
            if group.code == code:
                finding = _finding(trace, group, headline, trace.owners)
                yield replace(finding, fixes=(*finding.fixes, advise(finding))) if advise else finding

    return find


def settled(trace: Trace) -> frozenset[tuple[str, str]]:
    """Return the (code, cause) of errors in a partial trace that the full trace will have too."""
    codes = {code for code, claim in all_claims() if claim.grouped and claim.settled}
    return frozenset(
        (group.code, cause_text(group.cause, trace.owners)) for group in groups(trace) if group.code in codes
    )


def of_failure(trace: Trace, failure: Failure, code: str) -> Finding | None:
    """Return rule `code`'s finding for a dtype refused by the model's code; None without a mismatched tensor."""
    taken = _named_dtypes(failure.error)
    at_hand = [o for o in failure.operands if o.origin.cause.kind != "constant"]
    compute = sides_in(trace).at(failure.module, [operand.origin.cause for operand in at_hand])
    refused = _refused_dtypes(failure.error) if not taken else frozenset()
    if refused:
        mismatched = [o for o in at_hand if o.dtype in refused][-1:]
    elif taken:
        # The latest one is the nearest to the line that raised.
        mismatched = [o for o in at_hand if o.dtype not in taken][-1:]
    else:
        mismatched = [o for o in at_hand if o.dtype != compute]
    if not mismatched:
        return None
    owners = trace.owners
    call = Call(
        "",
        failure.phase,
        failure.module,
        failure.source,
        failure.operands,
        (),
        breach=Breach(failure.error, False, None),
    )
    if refused:
        taken = frozenset({torch.float32})
    expected = (
        compute
        if compute in taken or not taken
        else min(taken, key=lambda dtype: (dtype.itemsize, str(dtype)))
    )
    causes = distinct(origin for o in mismatched for origin in _alike(o.origin.cause, owners))
    group = Group(code, (call,), mismatched[0], causes, expected, compute, "by the model")
    return _finding(trace, group, "the model's own code refuses {given}", owners)


def _alike(cause: Origin, owners: Mapping[str, Weight]) -> Iterator[Origin]:
    """Yield a cause and the weights of the same kind, at which the step would end next."""
    yield cause
    owner = owners.get(cause.name) if cause.kind == "parameter" else None
    if owner is None:
        return
    kind = (owner.module_class, owner.name.rpartition(".")[2], owner.dtype)
    for weight in owners.values():
        if (weight.module_class, weight.name.rpartition(".")[2], weight.dtype) == kind:
            yield Origin("parameter", weight.dtype, weight.name)


_TAKES = re.compile(
    r"(?:must be|only supports?|expects?|only)\b(.*?)(?:,? but (?:got|found)| (?:is|are) supported|$)",
    re.IGNORECASE | re.DOTALL,
)


_REFUSES = re.compile(
    r"(?:unsupported|not implemented for|(?:not|n't) support(?:ed)?\b|\bgot\b|\bfound\b)(.*)",
    re.IGNORECASE | re.DOTALL,
)


_NAMES = {
    torch.float32: r"float[ -]?32|fp[ -]?32|(?<!b)float(?![ -]?\d)",
    torch.float64: r"double|float[ -]?64|fp[ -]?64",
    torch.float16: r"(?<!b)float[ -]?16|fp[ -]?16|half",
    torch.bfloat16: r"bfloat[ -]?16|bf[ -]?16",
}


def _named_dtypes(error: str) -> frozenset[torch.dtype]:
    """Return the dtypes that an error names as accepted ("must be either float or double"); empty if none."""
    return _dtypes_in(_TAKES.search(error))


def _refused_dtypes(error: str) -> frozenset[torch.dtype]:
    """Return the 16-bit dtype that an error names as refused ("Unsupported dtype BFloat16"); empty if none."""
    named = _dtypes_in(_REFUSES.search(error))
    return named if len(named) == 1 and all(dtype.itemsize < 4 for dtype in named) else frozenset()


def _dtypes_in(part: re.Match[str] | None) -> frozenset[torch.dtype]:
    return frozenset(
        dtype for dtype, name in _NAMES.items() if part and re.search(name, part[1], re.IGNORECASE)
    )


def _finding(trace: Trace, group: Group, headline: str, owners: Mapping[str, Weight]) -> Finding:
    first = group.calls[0]
    assert first.breach is not None
    others = [
        dtype_name(o.dtype) for o in first.operands if o.dtype in FLOATS and o.dtype != group.mismatched.dtype
    ]
    # Attention's kernel on the fakes carries no information about the simulated device.
    op = "torch.scaled_dot_product_attention" if "_scaled_dot_product" in first.op else first.op
    return Finding(
        code=group.code,
        severity="error",
        message=headline.format(
            given=dtype_name(group.mismatched.dtype),
            expected=(others or [dtype_name(group.expected)])[0],
            op=op,
        ),
        module=first.module,
        op=op,
        phase=first.phase,
        source=first.source,
        cause=cause_text(group.cause, owners),
        evidence=evidence(group.mismatched.origin),
        notes=_notes(group, trace.setup.profile.unlike),
        fixes=tuple(candidates(trace, group, owners)),
        operands=first.operands,
        places=places(group.calls),
    )


def _notes(group: Group, unlike: str) -> tuple[str, ...]:
    first = group.calls[0]
    assert first.breach is not None
    notes = []
    more = sum(call.repeats for call in group.calls) - 1
    if more:
        modules = len(places(group.calls))
        where = f" in {modules} modules" if modules > 1 else ""
        fails = "fail" if more > 1 else "fails"
        notes.append(f"{plural(more, 'more operator')}{where} {fails} for the same cause")
    notes += device_says(first)
    if first.breach.assumed:
        family = "from the operator's family: not measured on this device"
        notes.append(f"assumed: {unlike}" if unlike else f"assumed {family}")
    return tuple(notes)
