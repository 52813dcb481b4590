"""An epsilon that becomes 0 in 16 bits, or a clamp's bound that becomes 1

**What it means.** In 16 bits, an epsilon becomes zero, or the bound of a clamp becomes 1. An epsilon should keep a divisor or the argument
of a logarithm above zero, but the smallest positive number of float16 is 6e-8. Examples are `x / (norm + 1e-8)`, `log(p.clamp(min=1e-12))`,
and `F.normalize` with its default, 1e-12. A clamp with `max=1 - 1e-6` should keep values below 1, but the largest number below 1 is 0.9995
in float16, and 0.996 in bfloat16.

**Why it is bad.** For a row of zeros, the line computes log(0) or 0 / 0, and the loss of the step is NaN. Examples of such rows are
padding, an empty span, and squares that float16 rounds to zero. A step without such a row is not affected. In bfloat16, the sigmoid of a score
above 6.3 is 1, so log(1 - 1) is infinite. Even if the loss is finite, the gradient at the bound of a clamp may be NaN.

**An example that costs**

    pooled = F.normalize(hidden.half().mean(1), dim=-1)                                     # a row of zeros becomes NaN

**Repaired**

    pooled = F.normalize(hidden.half().mean(1), dim=-1, eps=torch.finfo(torch.float16).tiny)    # 6e-5

**What is not reported.** The rule ignores lines in the code of transformers' models, such as divisions by a sum of scores.

**How safe is the fix?** The fix is safe: the new epsilon is 6e-5, because smaller float16 divisors are inexact in any case. The new bound
of a clamp is `1 - torch.finfo(dtype).eps`. A line that computes in float32 can keep its epsilon or bound.

**Seen in** pytorch/pytorch #32137; kornia/kornia #3966, #4021; pyg-team/pytorch_geometric #2106; MinishLab/model2vec #368;
fastino-ai/GLiNER2 #155; lightonai/pylate #239.
"""

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import grouped
from isotype.records.trace import Call, Trace
from isotype.rules.kit.findings import Findings, advice, finding_at
from isotype.rules.kit.words import TRANSFORMERS, at, evidence, op_name, place

_GUARDS = {
    **dict.fromkeys(("add", "add_"), "other"),
    **dict.fromkeys(("clamp", "clamp_", "clamp_min", "clamp_min_"), "min"),
}
"""Maps an operator that can keep a value above zero to the name of its epsilon argument."""
_CLAMPS = frozenset({"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_"})


def find(trace: Trace) -> Findings:
    forward = (c for c in trace.calls if c.phase in ("forward", "generate") and not c.recomputed)
    guards = (call for call in forward if _lost(call))
    for calls in grouped(guards, lambda call: (place(call), _lost(call))).values():
        first, number, dtype = calls[0], _lost(calls[0]), calls[0].results[0][0]
        if whole := round(number):
            written = f"a bound of {number:.15g}"
            effect = f"the clamp returns {whole}, where log(1 - x), atanh and acos have no finite gradient"
            instead = f"{'-' * (number < 0)}(1 - torch.finfo({dtype}).eps)"
        else:
            written = f"an epsilon of {number:g}"
            effect = "zero stays zero, and its quotient or logarithm is not finite"
            instead = "torch.finfo(torch.float16).tiny (6e-05)"
        value = written.rpartition(" ")[2]
        how = f"write {instead} instead of {value}, or compute this line in float32"
        yield finding_at(
            "warning",
            f"{written} is {whole or 'zero'} in {dtype_name(dtype)}: {effect}",
            calls,
            cause=f"{op_name(first)} of a {dtype_name(dtype)} tensor and {value}{at(first.source)}",
            evidence=evidence(first.operands[0].origin),
            fixes=(advice(place(first), how),),
        )


def _lost(call: Call) -> float:
    """Return the epsilon of a norm, or the bound of a clamp, that becomes a whole number in the call's dtype; else 0.0."""
    if TRANSFORMERS in call.source or not call.results or call.results[0][0] not in HALVES:
        return 0.0
    numbers, dtype, name = dict(call.numbers), call.results[0][0], op_name(call)
    epsilon = numbers.get(_GUARDS.get(name, ""), 0.0)
    if epsilon > 0 and torch.tensor(epsilon, dtype=dtype) == 0:
        return epsilon
    bounds = (numbers.get(role, 0.0) for role in ("min", "max")) if name in _CLAMPS else ()
    inside = (bound for bound in bounds if 0 < abs(bound) < 1)
    return next((bound for bound in inside if abs(torch.tensor(bound, dtype=dtype)) == 1), 0.0)
