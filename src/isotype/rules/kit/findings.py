"""Constructors of findings and fixes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from isotype.core.dtypes import dtype_name
from isotype.core.names import distinct_names, plural, short
from isotype.records.finding import Action, ActionKind, Finding, Fix, Severity
from isotype.records.reach import Leak, Reach
from isotype.records.trace import Call, Failure, Trace, Weight

Findings = Iterator[Finding]
Fixes = Iterator[Fix]


def places(of: Iterable[Call | Weight]) -> tuple[str, ...]:
    """Return the modules of calls or weights without duplicates."""
    return tuple(dict.fromkeys(item.module for item in of))


def finding_at(severity: Severity, message: str, calls: Sequence[Call], **more: Any) -> Finding:
    """Return a finding about calls that have the same cause. The first call determines the place and the operands of the finding."""
    first = calls[0]
    place = {"module": first.module, "op": first.op, "phase": first.phase, "source": first.source}
    return Finding(
        severity, message, **{**place, "operands": first.operands, "places": places(calls), **more}
    )


def finding_of(
    severity: Severity, message: str, weights: Sequence[Weight], *, cause: str = "", **more: Any
) -> Finding:
    """Return a finding about weights. The first weight determines the finding's module and its default cause."""
    names = distinct_names(weight.name for weight in weights)
    first, dtype = weights[0], dtype_name(weights[0].dtype)
    cause = cause or first.dtype_text
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
    """Return the measured dependences of the step's outputs on its inputs; an empty `Reach` if nothing was measured."""
    return trace.reach or Reach("", rows=0, tokens=0)


def rounding_at(trace: Trace, at: str, keep: str) -> tuple[str, Fix]:
    """Return the cause of `Call.off`, rounding at the line or weight or input `at`, and a fix; `keep` is the fix of an input."""
    if ":" in at:
        line = fix(f"keep this number in float32 at {short(at)}", "line", (at,), "float32")
        return f"numbers are rounded to 16 bits at {short(at)}", line
    if (buffer := trace.owners.get(at)) is None:
        return f"the input {at} is 16-bit", advice(at, keep)
    how = "in float32, because a cast back to float32 does not restore lost digits"
    again = advice(buffer.module, f"cast the model first, then compute {at} {how}")
    return f"the buffer {buffer.dtype_text}", again


def fix(description: str, kind: ActionKind, targets: Iterable[str], value: str, safe: bool = True) -> Fix:
    """Return a fix that makes the same change at every distinct target."""
    return Fix(description, "safe" if safe else "unsafe", actions=actions(kind, targets, value))


def actions(kind: ActionKind, targets: Iterable[str], value: str) -> tuple[Action, ...]:
    """Return the same action on every distinct target."""
    return tuple(Action(kind, target, value) for target in dict.fromkeys(targets))


def advice(target: str, how: str, value: str | None = None) -> Fix:
    """Return a fix that the user has to apply, as `how` describes. `value` is a short description of the fix."""
    return fix(how, "advice", (target,), how if value is None else value)


def setting(description: str, target: str, value: str, safe: bool = True) -> Fix:
    return fix(description, "setting", (target,), value, safe)
