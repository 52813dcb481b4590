"""
**What it means.** An epsilon should keep a divisor above zero, but is zero in float16, whose smallest positive number
is 6e-8. Examples are `x / (norm + 1e-8)`, `log(p.clamp(min=1e-12))`, and `F.normalize` with its default epsilon, 1e-12.

**Why it is bad.** The first row of zeros (padding, an empty span, squares that float16 rounds to zero) makes the line
compute 0 / 0 or log(0), and the loss of the step is NaN. Steps without a zero row are not affected.

**An example that costs**

    pooled = F.normalize(hidden.half().mean(1), dim=-1)                                     # a row of zeros becomes NaN

**Repaired**

    pooled = F.normalize(hidden.half().mean(1), dim=-1, eps=torch.finfo(torch.float16).tiny)    # 6e-5

**What is not reported.** Lines of published transformers models, whose routers divide by sums of scores that
are never zero.

**How safe is the fix?** Safe: float16 numbers below 6e-5 have fewer digits, so a divisor below the new epsilon is
inexact anyway. A line that computes in float32 needs no other epsilon.

**Seen in** pytorch/pytorch #32137; kornia/kornia #3966, #4021; pyg-team/pytorch_geometric #2106;
MinishLab/model2vec #368.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isotype.core.names import grouped, short
from isotype.records.finding import Finding, finding_at
from isotype.records.trace import Call, Trace
from isotype.rules.kit.words import TRANSFORMERS, advice, evidence

TITLE = "An epsilon that is zero in float16"

_GUARDS = {
    **dict.fromkeys(("add", "add_"), "other"),
    **dict.fromkeys(("clamp", "clamp_", "clamp_min", "clamp_min_"), "min"),
}
"""For each operator that can keep a value above zero: the name of its epsilon argument."""


def find(trace: Trace) -> Iterator[Finding]:
    guards = (
        call
        for call in trace.calls
        if call.phase in ("forward", "generate") and not call.recomputed and _epsilon(call)
    )
    for calls in grouped(guards, lambda call: (call.source or call.module, _epsilon(call))).values():
        first, epsilon = calls[0], _epsilon(calls[0])
        at = f" at {short(first.source)}" if first.source else ""
        how = f"write torch.finfo(torch.float16).tiny (6e-05) instead of {epsilon:g}, or compute in float32 there"
        yield finding_at(
            "IST811",
            "warning",
            f"an epsilon of {epsilon:g} is zero in float16: a denominator of zero stays zero, and the quotient is not finite",
            first,
            calls,
            cause=f"{_name(first)} of a float16 tensor and {epsilon:g}{at}",
            evidence=evidence(first.operands[0].origin),
            fixes=(advice(first.source or first.module, how),),
        )


def _epsilon(call: Call) -> float:
    """Return the epsilon that a call adds or clamps to, if float16 rounds it to zero. Return 0 for any other call."""
    if TRANSFORMERS in call.source:
        return 0.0
    number = dict(call.numbers).get(_GUARDS.get(_name(call), ""), 0.0)
    if number <= 0 or not call.results or call.results[0][0] != torch.float16:
        return 0.0
    return number if torch.tensor(number, dtype=torch.float16) == 0 else 0.0


def _name(call: Call) -> str:
    return call.op.split(".")[1] if call.op.startswith("aten.") else ""
