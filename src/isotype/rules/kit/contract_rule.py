"""The findings of rules on broken contracts (IST1xx). One finding contains all operators that fail for the same cause."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from isotype.core.dtypes import dtype_name
from isotype.records.finding import Finding
from isotype.records.trace import ATTENTION, Breach, Call, Failure, Origin, Trace, Weight
from isotype.rules.kit.contract_fixes import candidates
from isotype.rules.kit.findings import Findings, finding_at, places
from isotype.rules.kit.groups import Group, all_claims, code_of, distinct, dtypes_in, groups, sides_in
from isotype.rules.kit.words import cause_text, device_error, evidence, more


def find(module: str, trace: Trace) -> Findings:
    """Yield a finding for each group of broken contracts that the rule in `module` claims."""
    return (finding for _, finding in with_groups(module, trace))


def with_groups(module: str, trace: Trace) -> Iterator[tuple[Group, Finding]]:
    """Yield the groups of broken contracts that the rule in `module` claims, with their findings."""
    return ((group, _finding(trace, group)) for group in groups(trace) if group.code == code_of(module))


def settled(trace: Trace) -> frozenset[tuple[str, str]]:
    """Return (code, cause) for those errors of an incomplete trace that a complete trace would also contain."""
    codes = {code for code, claim in all_claims() if claim.headline and claim.settled}
    return frozenset(
        (group.code, cause_text(group.cause, trace.owners)) for group in groups(trace) if group.code in codes
    )


def of_failure(trace: Trace, failure: Failure) -> Finding | None:
    """Return a finding if the model's code raised an error about a tensor's dtype; else None."""
    accepted = dtypes_in(_TAKES.search(failure.error))
    refused = frozenset() if accepted else dtypes_in(_REFUSES.search(failure.error))
    tensors = [o for o in failure.operands if o.origin.cause.kind != "constant"]
    compute = sides_in(trace).at(failure.module, [operand.origin.cause for operand in tensors])
    # The latest tensor is the nearest to the line that raised.
    if len(refused) == 1 and all(dtype.itemsize < 4 for dtype in refused):
        mismatched = [o for o in tensors if o.dtype in refused][-1:]
        accepted = frozenset({torch.float32})
    elif accepted:
        mismatched = [o for o in tensors if o.dtype not in accepted][-1:]
    else:
        mismatched = [o for o in tensors if o.dtype != compute]
    if not mismatched:
        return None
    breach = Breach(failure.error, False, None)
    call = Call("", failure.phase, failure.module, failure.source, failure.operands, (), breach=breach)
    narrowest = min(accepted, key=lambda dtype: (dtype.itemsize, str(dtype)), default=compute)
    expected = compute if compute in accepted else narrowest
    causes = distinct(origin for o in mismatched for origin in _alike(o.origin.cause, trace.owners))
    headline = "the model's own code does not accept {given}"
    group = Group((call,), mismatched[0], causes, expected, compute, "by the model", headline=headline)
    return _finding(trace, group)


def _alike(cause: Origin, owners: Mapping[str, Weight]) -> Iterator[Origin]:
    """Yield `cause`. If the operand is a weight, also yield weights with the same name and dtype in modules of the same class."""
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
"""The part of an error that names the accepted dtypes, as in "must be either float or double"."""
_REFUSES = re.compile(
    r"(?:unsupported|not implemented for|(?:not|n't) support(?:ed)?\b|\bgot\b|\bfound\b)(.*)",
    re.IGNORECASE | re.DOTALL,
)
"""The part of an error that names the refused dtype, as in "Unsupported dtype BFloat16"."""


def _finding(trace: Trace, group: Group) -> Finding:
    first = group.calls[0]
    others = [dtype_name(o.dtype) for o in first.floats if o.dtype != group.mismatched.dtype]
    # On fake tensors, attention has another kernel than on the simulated device.
    op = ATTENTION if "_scaled_dot_product" in first.op else first.op
    dtype, expected = dtype_name(group.mismatched.dtype), dtype_name(group.expected)
    expected = others[0] if others and expected not in others else expected
    return finding_at(
        "error",
        group.headline.format(given=dtype, expected=expected, op=op),
        (replace(first, op=op), *group.calls),
        cause=cause_text(group.cause, trace.owners),
        evidence=evidence(group.mismatched.origin),
        notes=_notes(group, trace),
        fixes=tuple(candidates(trace, group)),
    )


def _notes(group: Group, trace: Trace) -> tuple[str, ...]:
    first, others = group.calls[0], sum(call.repeats for call in group.calls) - 1
    modules = len(places(group.calls))
    where = f" in {modules} modules" if modules > 1 else ""
    same = f"{where} {'fail' if others > 1 else 'fails'} for the same cause"
    unlike, mismatched = trace.setup.profile.unlike, group.mismatched.dtype
    weights = (trace.owners.get(o.origin.name) for o in first.floats if o.dtype != mismatched)
    known = [weight.dtype_text for weight in weights if weight is not None and weight.set_at]
    notes = (*known[:1], *more(others, "operator", same), *device_error(first.refusal))
    if first.breach is None or not first.breach.assumed:
        return notes
    by_family = "assumed from similar operators, because this operator was not measured on this device"
    return (*notes, f"assumed: {unlike}" if unlike else by_family)
