"""Gradients of many micro-batches or chunks added up in 16 bits

**What it means.** The gradients of many micro-batches are added up in a 16-bit `.grad`. The rule also reports a line of code that adds up
the parts of a weight's gradient in a 16-bit tensor, as a loss that computes the logits in chunks does. Each addition rounds the sum. After
64 additions, the sum is wrong by about 0.9 % in bfloat16, and by 0.1 % in float16.

**Why it is bad.** A gradient that is small compared with the sum adds nothing, so the first micro-batches count more than the last ones.
The loss falls, but many accumulated micro-batches train worse than the same rows in one large batch.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    SFTConfig(gradient_accumulation_steps=64)                # 64 sums in bfloat16

**Repaired**

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    SFTConfig(bf16=True, gradient_accumulation_steps=64)     # float32 gradients, but matmuls in bfloat16

**What is not reported.** The rule ignores errors below 0.5 %. In bfloat16, a sum of 20 micro-batches has an error of 0.5 %. In float16, a
sum of 1,259 micro-batches has this error.

**How safe is the fix?** The fix is safe: a cast to float32 keeps every value. Float32 weights, or a float32 sum, take more memory.

**Seen in** NVIDIA/Megatron-LM #502; mlnomadpy/flaxchat #6; axolotl-ai-cloud/axolotl #1601; linkedin/Liger-Kernel #1391;
allenai/OLMo-core #370.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import grouped, short
from isotype.core.operators import ADDS_IN_PLACE
from isotype.records.trace import Call, Trace, Weight
from isotype.rules.kit.findings import Findings, advice, finding_at, finding_of
from isotype.rules.kit.weight_sets import count, float32_masters, spacing, trained
from isotype.rules.kit.words import op_name

_VISIBLE = 0.005
"""The rule reports relative errors from this size. A smaller error is below the noise of a gradient over many rows."""


def find(trace: Trace) -> Findings:
    micro_batches = trace.setup.accumulates
    for dtype in HALVES:
        weights = trained(trace, dtype)
        error = _error(micro_batches, dtype)
        if weights and error >= _VISIBLE:
            affected = f"affects {count(weights)} of {count(trained(trace))} trainable parameters"
            yield finding_of(
                "warning",
                f"gradients of {micro_batches} micro-batches are added up in {dtype_name(dtype)}",
                weights,
                phase="backward",
                notes=(f"{affected}; the sums are wrong by about {100 * error:.1f} %",),
                fixes=float32_masters(trace, weights),
            )
    alike = grouped(trained(trace, *HALVES), lambda weight: (weight.shape, weight.dtype))
    sums = ((name, call) for call in trace.calls if (name := _summed(call, alike)))
    for (name, line), rows in grouped(sums, lambda row: (row[0], row[1].source)).items():
        number, dtype = sum(call.repeats for _, call in rows), rows[0][1].operands[0].dtype
        if (error := _error(number, dtype)) >= _VISIBLE:
            yield finding_at(
                "warning",
                f"{number} values are added up in a {dtype_name(dtype)} tensor with the shape of {name}",
                [call for _, call in rows],
                cause=f"{op_name(rows[0][1]).strip('_')} into a {dtype_name(dtype)} tensor at {short(line)}",
                notes=(f"the sum is off by about {100 * error:.1f} %",),
                fixes=(advice(line, f"add up in a float32 tensor at {short(line)}, and cast the sum once"),),
            )


def _error(additions: int, dtype: torch.dtype) -> float:
    """Return the relative error of a sum of so many numbers of equal size."""
    return math.sqrt(additions / 3) * spacing(1.0, dtype) / 4


_CREATED = frozenset({"zeros", "zeros_like", "new_zeros"})


def _summed(call: Call, alike: Mapping[Any, Sequence[Weight]]) -> str:
    """Return the trained weight with the shape of the new 16-bit tensor to which `call` adds; "" for other calls.

    `alike`: (shape, dtype) -> trained 16-bit weights.
    """
    adds = ADDS_IN_PLACE.match(call.op) or call.op in ("aten.add.out", "aten.addmm.out", "aten.baddbmm.out")
    into = next((operand for operand in call.operands if operand.role == "self"), None)
    if not adds or into is None or not call.source or call.phase not in ("forward", "backward"):
        return ""
    # `zeros_like(weight)` has the weight's origin in the forward, and its own name in the backward.
    if into.origin.kind != "parameter" and into.origin.name not in _CREATED:
        return ""
    names = [weight.name for weight in alike.get((into.shape, into.dtype), ())]
    return into.origin.name if into.origin.name in names else next(iter(names), "")
