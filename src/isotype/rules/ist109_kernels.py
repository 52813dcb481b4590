"""
**What it means.** The operands agree, but the device has no kernel for their dtype.

**Why it happens.** Linear algebra (SVD, inverse, eigenvalues), Fourier transforms, quantiles, histograms and some losses
exist in float32 and float64 only; others lack float16 on a CPU or bfloat16 on an older GPU. `binary_cross_entropy` is
refused under a GPU's autocast in any dtype: the logarithm of a rounded probability overflows.

**An example that fails**

    torch.linalg.svd(weight.bfloat16())      # "linalg_svd_cpu" not implemented for 'BFloat16'

**Repaired**

    torch.linalg.svd(weight.float()).U.to(weight.dtype)

**How safe is the fix?** Computing in float32 and rounding once is more exact than any kernel in 16 bits would be.

**Seen in** huggingface/peft #1052; arcee-ai/mergekit #304; h2oai/h2o-llmstudio #233; tloen/alpaca-lora #308;
pytorch/pytorch #61098, #117844.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from isotype.core.dtypes import dtype_name
from isotype.core.names import short
from isotype.rules.finding import Action, Finding, Fix, finding_at
from isotype.rules.kit import operands
from isotype.rules.kit.groups import refused_as_unsafe
from isotype.trace.record import Call, Trace

TITLE = "No kernel for this dtype"


def find(trace: Trace) -> Iterator[Finding]:
    """Operators that the device has no kernel for in the dtype they are given."""
    for finding in operands.find(trace, "IST109", "{op} has no kernel for {odd} on this device"):
        where = short(finding.source)
        advice = Fix(
            f"call it in float32 at {where} and cast the result back",
            "safe",
            actions=(Action("advice", finding.source, ".float()"),),
        )
        cause = f"{finding.op} is called in {dtype_name(finding.operands[0].dtype)} at {where}"
        yield replace(finding, cause=cause, fixes=(*finding.fixes, advice))
    refused = {call.source: call for call in trace.breaches() if refused_as_unsafe(call)}
    yield from map(_unsafe, refused.values())


def _unsafe(call: Call) -> Finding:
    assert call.breach is not None
    assert call.autocast is not None
    where = short(call.source)
    return finding_at(
        "IST109",
        "error",
        f"{call.op} is refused under autocast",
        call,
        cause=f"{call.op} is called under autocast to {dtype_name(call.autocast)} at {where}",
        notes=(f"the device says: {call.breach.message}",),
        fixes=(
            Fix(
                f"switch autocast off around {where} and call it in float32",
                "safe",
                actions=(Action("line", call.source, "float32"),),
            ),
            Fix(
                "take the logits: drop the sigmoid, and call binary_cross_entropy_with_logits",
                "safe",
                actions=(Action("advice", call.source, "binary_cross_entropy_with_logits"),),
            ),
        ),
    )
