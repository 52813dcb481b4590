"""Findings and fixes of rules, and the words for causes and places in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from isotype.core.dtypes import dtype_name
from isotype.core.names import distinct_names, plural, short
from isotype.records.finding import Action, ActionKind, Finding, Fix, Severity
from isotype.records.reach import Leak, Reach
from isotype.records.trace import FROM_NUMPY, Call, Failure, Origin, Trace, Weight

Findings = Iterator[Finding]
"""The result of a rule's `find`."""

TRANSFORMERS = "/transformers/models/"
LIBRARIES = (TRANSFORMERS, "/diffusers/")
"""Folders of transformers' and diffusers' code. Many trainings run this code, so findings in it would be false alarms."""


def places(of: Iterable[Call | Weight]) -> tuple[str, ...]:
    """Return the modules of calls or weights without duplicates."""
    return tuple(dict.fromkeys(item.module for item in of))


def finding_at(severity: Severity, message: str, calls: Sequence[Call], **more: Any) -> Finding:
    """Return a finding about calls with one cause. The first call determines its place and operands."""
    first = calls[0]
    place = {"module": first.module, "op": first.op, "phase": first.phase, "source": first.source}
    return Finding(
        severity, message, **{**place, "operands": first.operands, "places": places(calls), **more}
    )


def finding_of(
    severity: Severity, message: str, weights: Sequence[Weight], *, cause: str = "", **more: Any
) -> Finding:
    """Return a finding about weights. The first weight determines its module and its default cause."""
    names = distinct_names(weight.name for weight in weights)
    first, dtype = weights[0], dtype_name(weights[0].dtype)
    cause = cause or f"{first.name} is {dtype}"
    lines = (f"{names[0]}: {dtype} {list(first.shape)}", *(f"also {name}" for name in names[1:4]))
    return Finding(
        severity, message, first.module, cause=cause, evidence=lines, places=places(weights), **more
    )


def finding_after(severity: Severity, message: str, failure: Failure, **more: Any) -> Finding:
    """Return a finding about the error that ended the trace."""
    place = {"module": failure.module, "phase": failure.phase, "source": failure.source}
    return Finding(severity, message, **{**place, "places": (failure.module,), **more})


def finding_of_leak(
    reach: Reach, leak: Leak, severity: Severity, message: str, cause: str, fix: Fix
) -> Finding:
    """Return a finding about predictions that depend on a forbidden input."""
    changed = f"{leak.changed:,} of {plural(leak.of, 'prediction')} change"
    first = f"the first at row {leak.row}, token {leak.column}"
    largest = f"the largest change is {leak.largest:.2g} times the largest logit"
    notes = (f"{changed}, {first}; {largest}", reach.measured)
    at = (leak.module,) if leak.module else ()
    return Finding(severity, message, leak.module, cause=cause, notes=notes, fixes=(fix,), places=at)


def reach_of(trace: Trace) -> Reach:
    """Return what was measured about the step's dependences; an empty `Reach` if nothing was measured."""
    return trace.reach or Reach("", rows=0, tokens=0)


def cause_text(cause: Origin, owners: Mapping[str, Weight] | None = None) -> str:
    """Return a description of the origin of a dtype, in one line."""
    dtype, where = dtype_name(cause.dtype), at(cause.source)
    inside = f" in {cause.module}" if cause.module else ""
    weight = (owners or {}).get(cause.name)
    if cause.kind == "parameter":
        pinned = ", which the model's author keeps in float32" if weight is not None and weight.pinned else ""
        return f"{cause.name} is {dtype}{pinned}"
    if cause.name == FROM_NUMPY:
        return f"{cause.name} is {dtype}, first used{where}{inside}"
    texts = {
        "buffer": f"the buffer {cause.name} is {dtype}",
        "input": f"the {'argument' if cause.name in ('input', 'inputs') else 'input'} {cause.name} is {dtype}",
        "outside": f"{cause.name} is {dtype}{where}{inside}",
        "scratch": f"the scratch tensor that {cause.name} allocated is {dtype}{where}",
        "attribute": f"{cause.name}, an unregistered tensor that no .to() of the model reaches, is {dtype}",
        "data": f"{cause.name or 'a tensor'} in the loss function is {dtype}{where}",
        "state": f"the quantization state of {cause.name} dequantizes to {dtype}",
        "cast": f"a cast to {dtype}{where}{inside}",
        "autocast": f"autocast returns {dtype} from {cause.name}{where}{inside}",
        "gradient": f"the gradient of {cause.name} is {dtype}",
        "conversion": f"{cause.name}{where}{inside} gets operands of several dtypes",
    }
    return texts.get(cause.kind, f"{cause.name} returns {dtype}{where}{inside}")


def evidence(origin: Origin) -> tuple[str, ...]:
    """Return a line for each step of a dtype's path from its origin to the operand."""
    lines = []
    for step in reversed(origin.path()):
        line = cause_text(step)
        where = f" at {short(step.source)}" + (f" in {step.module}" if step.module else "")
        if step.like is not None:
            line = f"{step.name} takes that dtype{where}"
        elif step.kind == "promotion":
            line = f"{step.name} with an operand of another dtype returns {dtype_name(step.dtype)}{where}"
        lines.append(line)
    return tuple(lines)


def device_error(what: Call | str) -> tuple[str, ...]:
    """Return a note with the device's error; () without an error. `what` is the error's text, or the call."""
    message = what if isinstance(what, str) else what.breach.message if what.breach is not None else ""
    return (f"the device raises: {message}",) if message else ()


def at(source: str) -> str:
    """Return ` at modeling_llama.py:64` for a source line, and "" for no line."""
    return f" at {short(source)}" if source else ""


def op_name(call: Call) -> str:
    """Return `mm` for the operator `aten.mm.default`; "" for an operator of another library than torch."""
    return call.op.split(".")[1] if call.op.startswith("aten.") else ""


def place(call: Call) -> str:
    """Return the line that made a call, or the module if the line is unknown."""
    return call.source or call.module


def fix(description: str, kind: ActionKind, targets: Iterable[str], value: str, safe: bool = True) -> Fix:
    """Return a fix that makes the same change at every distinct target."""
    return Fix(description, "safe" if safe else "unsafe", actions=actions(kind, targets, value))


def actions(kind: ActionKind, targets: Iterable[str], value: str) -> tuple[Action, ...]:
    """Return the same action on every distinct target."""
    return tuple(Action(kind, target, value) for target in dict.fromkeys(targets))


def advice(target: str, how: str, value: str | None = None) -> Fix:
    """Return a fix that the user has to make, as `how` describes. `value` is a short description of the fix."""
    return fix(how, "advice", (target,), how if value is None else value)


def setting(description: str, target: str, value: str, safe: bool = True) -> Fix:
    return fix(description, "setting", (target,), value, safe)


def and_others(names: Iterable[str]) -> str:
    """Return the first name with `*` for layer numbers, and "and others" if there are more names."""
    first, *others = distinct_names(names)
    return f"{first} and others" if others else first
