"""What the rules on broken contracts (IST1xx) share: from a group of breaches to a finding, and what would fix it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import named, short, starred
from isotype.rules.finding import Finding, Fix
from isotype.rules.kit.claims import all_claims, code_of
from isotype.rules.kit.fixes import fix
from isotype.rules.kit.groups import SCATTERS, Group, distinct, groups, sides_in
from isotype.rules.kit.siblings import modules_meant, weights_meant
from isotype.rules.kit.words import cause_text, device_says, evidence
from isotype.trace.record import FLOATS, Breach, Call, Failure, Operand, Origin, Trace, Weight


def contract_rule(
    module: str, headline: str, advise: Callable[[Finding], Fix] | None = None
) -> Callable[[Trace], Iterator[Finding]]:
    """The `find` of a rule on broken contracts: the findings of those that it claims, one for each cause.

    Args:
        module: `__name__` of the rule's file.
        headline: may use {given} and {expected}, names of dtypes, and {op}.
        advise: makes a last fix for each finding.
    """
    code = code_of(module)

    def find(trace: Trace) -> Iterator[Finding]:
        """The broken contracts that are this rule's, by cause."""
        for group in groups(trace):
            if group.code == code:
                found = _finding(trace, group, headline, trace.owners)
                yield replace(found, fixes=(*found.fixes, advise(found))) if advise else found

    return find


def settled(trace: Trace) -> frozenset[tuple[str, str]]:
    """Code and cause of errors that the whole step's trace shows, too, given that of its first phases."""
    codes = {code for code, claim in all_claims() if claim.grouped and claim.settled}
    return frozenset(
        (group.code, cause_text(group.cause, trace.owners)) for group in groups(trace) if group.code in codes
    )


def of_failure(trace: Trace, failure: Failure, code: str) -> Finding | None:
    """What the rule `code` finds where a check of the model's own code refused a dtype; None where no tensor is mismatched."""
    taken = _named_dtypes(failure.error)
    at_hand = [o for o in failure.operands if o.origin.cause.kind != "constant"]
    compute = sides_in(trace).at(failure.module, [operand.origin.cause for operand in at_hand])
    refused = _refused_dtypes(failure.error) if not taken else frozenset()
    if refused:
        mismatched = [o for o in at_hand if o.dtype in refused][-1:]
    elif taken:
        # The one that was made last is the nearest to the line that raised.
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
    """A cause with the weights of the same kind: the step ended at the first, and would end at the next one's."""
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
    """The dtypes that an error says are taken ("must be either float or double"); empty where it names none."""
    said = _TAKES.search(error)
    return _said(said)


def _refused_dtypes(error: str) -> frozenset[torch.dtype]:
    """The one 16-bit dtype that an error says is not taken ("Unsupported dtype BFloat16"); empty where it says another thing."""
    named = _said(_REFUSES.search(error))
    return named if len(named) == 1 and all(dtype.itemsize < 4 for dtype in named) else frozenset()


def _said(said: re.Match[str] | None) -> frozenset[torch.dtype]:
    return frozenset(
        dtype for dtype, name in _NAMES.items() if said and re.search(name, said[1], re.IGNORECASE)
    )


def _finding(trace: Trace, group: Group, headline: str, owners: Mapping[str, Weight]) -> Finding:
    first = group.calls[0]
    assert first.breach is not None
    others = [
        dtype_name(o.dtype) for o in first.operands if o.dtype in FLOATS and o.dtype != group.mismatched.dtype
    ]
    places = tuple(dict.fromkeys(call.module for call in group.calls))
    # Which kernel attention ran with on the fakes says nothing about the device that is asked about.
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
        notes=_notes(group, places, trace.setup.profile.unlike),
        fixes=tuple(candidates(trace, group, owners)),
        operands=first.operands,
        places=places,
    )


def _notes(group: Group, places: Sequence[str], unlike: str) -> tuple[str, ...]:
    first = group.calls[0]
    assert first.breach is not None
    notes = []
    more = sum(call.repeats for call in group.calls) - 1
    if more:
        where = f" in {len(places)} modules" if len(places) > 1 else ""
        plural = "s" if more > 1 else ""
        notes.append(f"{more} more operator{plural}{where} fail{'' if more > 1 else 's'} for the same cause")
    notes += device_says(first)
    if first.breach.assumed:
        family = "from the operator's family: not measured on this device"
        notes.append(f"assumed: {unlike}" if unlike else f"assumed {family}")
    return tuple(notes)


def candidates(trace: Trace, group: Group, owners: Mapping[str, Weight]) -> Iterator[Fix]:
    """What may fix a group; a second trace decides."""
    expected = dtype_name(_wanted(group))
    names = weights_meant(trace, (cause.name for cause in group.causes))
    blamed = [owners[cause.name] for cause in group.causes if cause.name in owners]
    yield from _adapter_fixes(trace, group, owners)
    if group.cause.kind == "parameter" and blamed:
        yield from _parameter_fixes(trace, blamed, expected)
    if group.cause.kind in ("buffer", "attribute"):
        what = "the buffer" if group.cause.kind == "buffer" else "the unregistered tensor"
        safety: Literal["safe", "unsafe"] = (
            "safe" if blamed and all(_keeps_digits(weight, expected) for weight in blamed) else "unsafe"
        )
        yield fix(f"cast {what} {_listed(names)} to {expected}", "buffer", names, expected, safety)
        beside = tuple(name for name in _held_beside(trace, group) if name not in names)
        if beside:
            every = (*names, *beside)
            yield fix(f"cast {what}s {_listed(every)} to {expected}", "buffer", every, expected, "unsafe")
    if group.cause.kind == "state":
        stale = [
            starred(weight.module)
            for weight in trace.weights
            if weight.quantization is not None and weight.quantization.state == group.cause.dtype
        ]
        yield fix(f"let the quantization states dequantize to {expected}", "state", stale or names, expected)
    yield from _hook_fixes(trace, group, expected)
    written = tuple(
        cause.source for cause in group.causes if cause.kind in ("cast", "constant") and cause.source
    )
    if written:
        where = _listed([short(source) for source in dict.fromkeys(written)])
        yield fix(
            f"write {expected} instead of {dtype_name(group.mismatched.dtype)} at {where}",
            "line",
            written,
            expected,
        )
    if trace.setup.autocast is None and expected in ("bfloat16", "float16") and group.refused != "dtype":
        yield fix(f"run the step under autocast to {expected}", "setting", ("autocast",), expected)
    called = tuple(dict.fromkeys(call.source for call in group.calls if call.source))
    yield from _call_fixes(group, called, expected)


def _held_beside(trace: Trace, group: Group) -> Iterator[str]:
    """Buffers and plain tensors that lie beside those that are mismatched, in the same dtype: a scale and its zero point."""
    homes = {cause.name.rpartition(".")[0] for cause in group.causes}
    held = {weight.name: weight.dtype for weight in trace.weights if weight.buffer}
    for operand in (operand for call in trace.calls for operand in call.operands):
        if operand.origin.cause.kind == "attribute":
            held[operand.origin.cause.name] = operand.origin.cause.dtype
    for name, dtype in held.items():
        if name.rpartition(".")[0] in homes and dtype == group.cause.dtype:
            yield starred(name)


def _call_fixes(group: Group, called: Sequence[str], expected: str) -> Iterator[Fix]:
    if called and len(called) <= 3:
        where = _listed([short(source) for source in called], 3)
        into = _written_into(group)
        what = f"the operands to {expected}" if into is None else f"what is written to {into}"
        yield fix(f"cast {what} at {where}", "line", called, into or expected)


def _written_into(group: Group) -> str | None:
    """The dtype that all calls of a group write into: no cast at the line changes that of the destination."""
    writes = any(name in group.calls[0].op for name in SCATTERS) or _in_place(group.calls[0].op)
    found = {call.operands[0].dtype for call in group.calls if call.operands}
    return dtype_name(found.pop()) if writes and len(found) == 1 else None


def _in_place(op: str) -> bool:
    """Whether an overload's name (`aten.lerp_.Scalar`) says that it writes into its first operand."""
    name = op.split(".")[1] if op.count(".") > 1 else ""
    return name.endswith("_") and not name.endswith("__")


def _wanted(group: Group) -> torch.dtype:
    """The dtype to bring the mismatched operand to: that of its side, or what it meets where it has that already."""
    if group.refused != "mixture":
        return group.expected
    if group.mismatched.dtype != group.side:
        return group.side
    met = (o.dtype for o in group.calls[0].operands if o.dtype in FLOATS and o.dtype != group.side)
    return next(met, group.side)


def _adapter_fixes(trace: Trace, group: Group, owners: Mapping[str, Weight]) -> Iterator[Fix]:
    """Where a few trained adapters have another dtype than most, these are out of place, whatever is computed in."""
    counts: Counter[torch.dtype] = Counter()
    for weight in trace.weights:
        if weight.adapter and weight.trainable and weight.dtype in FLOATS:
            counts[weight.dtype] += weight.repeats
    most = max(counts, key=lambda dtype: counts[dtype], default=None)
    if most is None or 2 * counts[most] <= counts.total():
        return
    steps = (step for call in group.calls for operand in call.operands for step in operand.origin.path())
    met = {step.name for step in steps if step.kind == "parameter"}
    layers = {
        _adapted(owners[name].module, trace.modules)
        for name in met
        if name in owners and owners[name].adapter
    }
    beside = [
        weight
        for weight in trace.weights
        if weight.adapter and weight.trainable and weight.dtype in FLOATS and weight.dtype != most
        and _adapted(weight.module, trace.modules) in layers
    ]  # fmt: skip
    # A cast that PEFT makes to an adapter's dtype hides which of its weights asked for it.
    few = [weight for weight in beside if weight.name in met] or beside
    if not few:
        return
    value, names = dtype_name(most), tuple(dict.fromkeys(starred(weight.name) for weight in few))
    exact = all(weight.dtype.itemsize < most.itemsize or weight.holds == most for weight in few)
    what = f"cast {_listed(names)} to {value}, the dtype of the other adapters"
    yield fix(what, "parameter", names, value, "safe" if exact else "unsafe")


def _adapted(module: str, modules: Mapping[str, str]) -> str:
    """The layer that the adapter `module` belongs to: the one that holds what it wraps, else the module around it."""
    parts = module.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((name for name in around if f"{name}.base_layer" in modules), module.rpartition(".")[0])


def _parameter_fixes(trace: Trace, blamed: Sequence[Weight], expected: str) -> Iterator[Fix]:
    # A layer's weight and bias go together: with one of them cast it takes no dtype at all.
    beside = {(weight.module, weight.dtype) for weight in blamed if weight.module}
    others = (w for w in trace.weights if (w.module, w.dtype) in beside and not w.buffer)
    weights = list({weight.name: weight for weight in (*blamed, *others)}.values())
    names = weights_meant(trace, (weight.name for weight in weights))
    modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
    first = weights[0]
    lossless = all(_keeps_digits(weight, expected) for weight in weights)
    cast = fix(
        f"cast {_listed(names)} to {expected}", "parameter", names, expected, "safe" if lossless else "unsafe"
    )
    if lossless:
        yield cast
    if all(weight.kind == "norm" for weight in weights):
        yield fix(f"return each {first.module_class}'s output in {expected}", "output", modules, expected)
    elif all(modules):
        what = _listed(modules)
        if (len(modules) > 1 or "*" in what) and len({weight.module_class for weight in weights}) == 1:
            what = f"each {first.module_class} of {what}"
        yield fix(
            f"let {what} cast at its border and compute in {expected}",
            "boundary",
            modules,
            f"compute:{expected}",
        )
    if not lossless:
        yield cast


def _keeps_digits(weight: Weight, expected: str) -> bool:
    """Whether casting a frozen weight loses nothing: to a wider dtype, or values that the narrow one holds."""
    if weight.trainable or weight.pinned:
        return False
    if expected == "float32" and weight.dtype.itemsize < 4:
        return True
    return weight.holds is not None and dtype_name(weight.holds) == expected


def _hook_fixes(trace: Trace, group: Group, expected: str) -> Iterator[Fix]:
    owners = trace.owners
    made_in = [
        step.module for step in group.mismatched.origin.path() if step.module and step.kind != "conversion"
    ]
    made_in += [cause.module for cause in group.causes if cause.module]
    # What flows out of a layer has the dtype of its weight; of norms `_parameter_fixes` says so.
    blamed = [owners[cause.name] for cause in group.causes if cause.name in owners]
    meant = weights_meant(trace, (weight.name for weight in blamed))
    # Where one layer of many has another dtype, only what it led to is meant.
    alone = len(meant) == 1 and "*" not in meant[0]
    made_in = made_in if alone else list(map(starred, made_in))
    if not _is_own(group.mismatched, group.calls[0]):
        flow = [w.name for w in blamed if w.module and not w.buffer and w.kind != "norm"]
        made_in += [name.rpartition(".")[0] for name in weights_meant(trace, flow)]
    makers = tuple(dict.fromkeys(made_in))
    for targets in (*([makers] if len(makers) > 1 else []), *((module,) for module in makers)):
        yield fix(f"return the outputs of {_listed(targets)} in {expected}", "output", targets, expected)
    if group.cause.kind == "input":
        yield fix(f"give the model {group.cause.name} in {expected}", "input", ("",), expected)
    # The whole model's input is named above where it is the cause; what a loss does comes after it.
    called = [call.module for call in group.calls if call.module and not _is_own(group.mismatched, call)]
    places = modules_meant(trace, called)
    if places:
        yield fix(f"take the inputs of {_listed(places)} in {expected}", "input", places, expected)


def _is_own(mismatched: Operand, call: Call) -> bool:
    """Whether an operand is a parameter, buffer or plain tensor that the calling module itself holds."""
    holds = mismatched.origin.kind in ("parameter", "buffer", "attribute")
    return holds and mismatched.origin.name.rpartition(".")[0] == call.module


def _listed(names: Iterable[str], shown: int = 2) -> str:
    names = [named(name) for name in names]
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
