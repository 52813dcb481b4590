"""
**What it means.** An optimizer step mixes dtypes: a fused kernel is given parameters, gradients and moments of different
dtypes, or the trainable parameters themselves are of several dtypes, so that only some of them are masters.

**Why it is bad.** Fused kernels take one dtype for parameter, gradient and both moments and raise otherwise. With mixed
parameters the 16-bit ones lose small updates while their neighbours do not.

**An example that fails**

    parameter.grad_dtype = torch.bfloat16                   # gradients reduced in bfloat16
    torch.optim.AdamW(model.parameters(), fused=True).step()

**Repaired**

    torch.optim.AdamW(model.parameters())                   # or gradients in the parameters' dtype

**How safe is the fix?** The other implementations of AdamW compute the same update. A cast to float32 keeps every digit.

**Seen in** pytorch/pytorch #110758; NVIDIA/TransformerEngine #3358.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from isotype.dtypes import dtype_name
from isotype.rules.finding import Action, Finding, Fix
from isotype.rules.weight_sets import HALVES, count, finding_of, float32_masters, trained
from isotype.rules.words import cause_text, short
from isotype.trace.record import FLOATS, Call, Trace

TITLE = "Mixed dtypes in the optimizer's step"


def find(trace: Trace) -> Iterator[Finding]:
    """Contracts that the optimizer's step breaks; float32 and 16-bit trainable parameters side by side."""
    broken = [call for call in trace.breaches() if call.phase == "optimizer"]
    if broken:
        yield _refused(trace, broken)
        return
    low = trained(trace, *HALVES)
    high = [weight for weight in trained(trace, torch.float32) if not weight.pinned]
    # Adapters of several dtypes are IST502's.
    if all(weight.adapter for weight in (*low, *high)):
        return
    if low and high and "optimizer" in trace.setup.phases:
        dtypes = Counter(dtype_name(weight.dtype) for weight in low)
        yield finding_of(
            "IST305",
            "warning",
            f"{count(low)} trainable parameters are {', '.join(sorted(dtypes))} beside {count(high)} in float32",
            low,
            phase="optimizer",
            fixes=float32_masters(trace, low)[:1],
        )


def _refused(trace: Trace, broken: list[Call]) -> Finding:
    first = broken[0]
    assert first.breach is not None
    dtypes = sorted(
        {dtype_name(operand.dtype) for operand in first.operands if operand.dtype.is_floating_point}
    )
    fused = "fused" in trace.setup.optimizer
    return Finding(
        "IST305",
        "error",
        f"{first.op} is given {' and '.join(dtypes)}",
        op=first.op,
        phase="optimizer",
        source=first.source,
        cause=_cause(first, trace),
        notes=(f"the device says: {first.breach.message}",),
        operands=first.operands,
        fixes=(_PLAIN,) if fused else (_own_code(first),),
        evidence=(f"{short(first.source)} {first.op}",) if first.source else (),
    )


_PLAIN = Fix("use an optimizer that is not fused", "safe", actions=(Action("setting", "optimizer", "adamw"),))


def _own_code(call: Call) -> Fix:
    """What to do in an optimizer's own Python code."""
    written = dtype_name(call.operands[0].dtype)
    return Fix(
        f"cast the operands to {written}, the dtype of what is updated, at {short(call.source)}",
        "safe",
        actions=(Action("line", call.source, written),),
    )


def _cause(call: Call, trace: Trace) -> str:
    """Who made the first operand that has another dtype than what is updated; else the gradient."""
    floats = [operand for operand in call.operands if operand.dtype in FLOATS]
    other = [operand for operand in floats if operand.dtype != floats[0].dtype]
    gradients = [operand for operand in floats if operand.origin.kind == "gradient"]
    odd = (other or gradients or list(call.operands))[0]
    if odd.origin.kind != "gradient":
        return cause_text(odd.origin.cause, trace.owners)
    of = (step.name for step in odd.origin.way() if step.kind == "parameter" or step.name in trace.owners)
    return f"the gradient of {next(of, odd.origin.name)} is {dtype_name(odd.dtype)}"
