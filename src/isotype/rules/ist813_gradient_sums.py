"""Gradients of many micro-batches added up in 16 bits

**What it means.** The gradients of many micro-batches are added up in a 16-bit `.grad`. Each addition rounds the sum.
After 64 additions, the sum is wrong by about 0.9 % in bfloat16, and by 0.1 % in float16.

**Why it is bad.** A gradient that is small compared with the sum adds nothing, so the first micro-batches weigh more
than the last ones. The loss falls, but many accumulated micro-batches train worse than the same rows in one large
batch.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    SFTConfig(gradient_accumulation_steps=64)                # 64 sums in bfloat16

**Repaired**

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    SFTConfig(bf16=True, gradient_accumulation_steps=64)     # float32 gradients, but matmuls in bfloat16

**What is not reported.** The rule ignores errors below 0.5 %. In bfloat16, a sum of 20 micro-batches has this error; in
float16, a sum of 1,259.

**How safe is the fix?** Safe: a cast to float32 keeps every value. Float32 weights take more memory.

**Seen in** NVIDIA/Megatron-LM #502; mlnomadpy/flaxchat #6.
"""

import math

from isotype.core.dtypes import HALVES, dtype_name
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, finding_of
from isotype.rules.kit.weight_sets import count, float32_masters, spacing, trained

_VISIBLE = 0.005
"""Smallest relative error that is reported. A smaller error is less than the noise of a gradient over many rows."""


def find(trace: Trace) -> Findings:
    micro_batches = trace.setup.accumulates
    for dtype in HALVES:
        weights = trained(trace, dtype)
        error = math.sqrt(micro_batches / 3) * spacing(1.0, dtype) / 4
        if weights and error >= _VISIBLE:
            affected = f"affects {count(weights)} of {count(trained(trace))} trainable parameters"
            yield finding_of(
                "warning",
                f"gradients of {micro_batches} micro-batches are added up in {dtype_name(dtype)}",
                weights,
                phase="backward",
                notes=(f"{affected}; the sums are off by about {100 * error:.1f} %",),
                fixes=float32_masters(trace, weights),
            )
