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
from isotype.rules.operands import short
from isotype.rules.weight_sets import HALVES, count, finding_of, float32_masters, trained
from isotype.trace.record import Call, Trace

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
    odd = next((o for o in first.operands if o.origin.kind == "gradient"), first.operands[0])
    plain = Action("setting", "optimizer", "adamw")
    fused = "fused" in trace.setup.optimizer
    return Finding(
        "IST305",
        "error",
        f"{first.op} is given {' and '.join(dtypes)}",
        op=first.op,
        phase="optimizer",
        source=first.source,
        cause=f"the gradient of {odd.origin.name} is {dtype_name(odd.dtype)}",
        notes=(f"the device says: {first.breach.message}",),
        operands=first.operands,
        fixes=(Fix("use an optimizer that is not fused", "safe", actions=(plain,)),) if fused else (),
        evidence=(f"{short(first.source)} {first.op}",) if first.source else (),
    )
