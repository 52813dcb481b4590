"""Findings for predictions that depend on a forbidden input."""

from __future__ import annotations

from isotype.core.names import plural
from isotype.records.finding import Finding, Fix, Severity
from isotype.records.reach import Leak, Reach, Source
from isotype.records.trace import Trace


def leak_of(trace: Trace, source: Source) -> Leak | None:
    return None if trace.reach is None else trace.reach.leak(source)


def leak_finding(trace: Trace, leak: Leak, severity: Severity, message: str, cause: str, fix: Fix) -> Finding:
    assert trace.reach is not None
    changed = f"{leak.changed:,} of {plural(leak.of, 'prediction')} change"
    return Finding(
        severity,
        message,
        module=leak.module,
        cause=cause,
        notes=(
            f"{changed}, the first at row {leak.row}, token {leak.column}; the largest change is {leak.largest:.2g} times the largest logit",
            measured_on(trace.reach),
        ),
        fixes=(fix,),
        places=(leak.module,) if leak.module else (),
    )


def measured_on(reach: Reach) -> str:
    return f"measured in float64 on {reach.copy}, with {plural(reach.rows, 'row')} of {plural(reach.tokens, 'token')}"


def where(leak: Leak) -> str:
    """Return the class name of the module that causes a leak."""
    return leak.kind or "the model"
