"""
**What it means.** `torch.arange` counts in 16 bits, or its numbers are cast to 16 bits, or an optimizer
counts its steps in 16 bits. bfloat16 represents every integer up to 256 and float16 up to 2048; beyond,
neighbours become equal.

**Why it is bad.** Positions, distances and bins that should differ are the same: from 512 on bfloat16
represents only every fourth position. Nothing fails, and short test sequences are not affected. A count of
steps stops at 256, and Adam's bias correction with it: every update after that is too small.

**An example that costs**

    positions = torch.arange(hidden.shape[1], dtype=hidden.dtype)      # bfloat16: 255, 256, 256, 258, 260, 260, …

**Repaired**

    positions = torch.arange(hidden.shape[1])                          # integers, or dtype=torch.float32

**How safe is the fix?** Safe: values derived from the positions are rounded once, at the end instead of the
start.

**Seen in** EleutherAI/gpt-neox #1003; pytorch/ao #4915.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import short
from isotype.records.finding import Finding, finding_at
from isotype.records.trace import Call, Trace
from isotype.rules.kit.words import advice, cause_text, fix

TITLE = "Integers too large for a 16-bit dtype"

_EXACT = {torch.bfloat16: 256, torch.float16: 2048}
"""Largest integer up to which all integers are exact."""


def find(trace: Trace) -> Iterator[Finding]:
    """Yield ranges in 16 bits that are too long for the dtype, and 16-bit step counts, by line."""
    yield from _counters(trace)
    angles = {
        call.rounded_at for call in trace.calls if call.off
    }  # reported as errors of the positions' sines
    by_source: dict[tuple[str, torch.dtype], list[Call]] = {}
    before: Call | None = None
    for call in trace.calls:
        now = call.phase in ("forward", "generate") and not call.recomputed and call.source not in angles
        if now and (_counts(call) or (before is not None and _casts(call, before))) and _is_too_long(call):
            by_source.setdefault((call.source, call.results[0][0]), []).append(call)
        before = call
    for (source, dtype), calls in by_source.items():
        name, count = dtype_name(dtype), calls[0].results[0][1][0]
        yield finding_at(
            "IST808",
            "warning",
            f"torch.arange makes {count:,} numbers in {name}: some neighbours are equal",
            calls[0],
            calls,
            cause=f"torch.arange in {name} at {short(source)}",
            notes=(f"{name} holds every whole number up to {_EXACT[dtype]:,}",),
            fixes=(
                fix(f"count in float32 at {short(source)}", "line", (source,), "float32"),
                advice(source, f"count in integers, and cast the results to {name}"),
            ),
        )


def _counters(trace: Trace) -> Iterator[Finding]:
    """Yield numbers that an optimizer creates in 16 bits and increments in each step."""
    by_source: dict[str, list[Call]] = {}
    for call in trace.calls:
        if call.phase == "optimizer" and call.op.startswith("aten.add_.") and _is_counter(call):
            by_source.setdefault(call.operands[0].origin.cause.source, []).append(call)
    for source, calls in by_source.items():
        cause = calls[0].operands[0].origin.cause
        name = dtype_name(cause.dtype)
        yield finding_at(
            "IST808",
            "warning",
            f"a count in {name} stops at {_EXACT[cause.dtype]:,}",
            calls[0],
            calls,
            cause=cause_text(cause),
            notes=(f"in {name} {_EXACT[cause.dtype]:,} + 1 is {_EXACT[cause.dtype]:,}",),
            fixes=(
                *(
                    [fix(f"count in float32 at {short(source)}", "line", (source,), "float32")]
                    if source
                    else []
                ),
                advice("step", "count in a Python number, or in a float32 tensor"),
            ),
        )


def _is_counter(call: Call) -> bool:
    """Return whether an integer is added to the call's only tensor, created for this purpose."""
    (operand, *others), cause = call.operands, call.operands[0].origin.cause
    single = not others and not call.numbers and math.prod(operand.shape) == 1
    return single and operand.dtype in _EXACT and cause.kind in ("constant", "outside")


def _counts(call: Call) -> bool:
    return call.op.startswith("aten.arange.")


def _casts(call: Call, before: Call) -> bool:
    """Return whether a call casts the result of the preceding count on the same line."""
    return _counts(before) and call.op.startswith("aten._to_copy.") and call.source == before.source


def _is_too_long(call: Call) -> bool:
    dtype, shape = call.results[0]
    # Even a range that starts below zero has equal neighbours if it is longer than this.
    return dtype in _EXACT and len(shape) == 1 and shape[0] > 2 * _EXACT[dtype] + 1
