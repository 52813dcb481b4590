"""Findings on predictions that depend on inputs that they must not depend on."""

from __future__ import annotations

from collections.abc import Iterable

from isotype.core.names import plural
from isotype.records.finding import Finding, Fix, Severity
from isotype.records.reach import Leak, Reach


def leak_finding(
    code: str, severity: Severity, message: str, reach: Reach, leak: Leak, cause: str, fixes: Iterable[Fix]
) -> Finding:
    """Return the finding of a leak, at the module that causes it."""
    of = f"{leak.changed:,} of {plural(leak.of, 'prediction')} change"
    return Finding(
        code,
        severity,
        message,
        module=leak.module,
        cause=cause,
        notes=(
            f"{of}, the first at row {leak.row}, token {leak.column}; the largest change is {leak.largest:.2g} of the largest logit",
            measured_on(reach),
        ),
        fixes=tuple(fixes),
        places=(leak.module,) if leak.module else (),
    )


def measured_on(reach: Reach) -> str:
    """Return a note on the measurement."""
    return f"measured in float64 on {reach.copy}, with {plural(reach.rows, 'row')} of {plural(reach.tokens, 'token')}"


def where(leak: Leak) -> str:
    """Return the class of the module that causes a leak."""
    return leak.kind or "the model"
