"""Quantization scales that are not float32

**What it means.** The scales (absmax) of a quantized layer are not float32. Some code cast the whole model or its state dict.

**Why it is bad.** Each scale multiplies a block of 64 weights.

- On a CPU, a bfloat16 scale changes every weight of its block by up to 0.4 %.
- CUDA kernels interpret the bytes of the scales as float32, so their results are random numbers.

**An example that costs**

    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}

**Repaired**

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=nf4)     # loads float32 scales again

**How safe is the fix?** The fix is safe: you load the model again, and do not cast the model or its state dict. A cast back to float32 does
not restore the scales.

**Seen in** bitsandbytes 0.50, which rounds the scales in evaluations on CPUs with AVX512-BF16 (reported as IST407).
"""

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import named
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_of
from isotype.rules.kit.weight_sets import counted, quantized


def find(trace: Trace) -> Findings:
    scales = ((weight, s.absmax) for weight, s in quantized(trace) if s.absmax is not None and not s.repacked)
    rounded = [(weight, d) for weight, d in scales if d.is_floating_point and d != torch.float32]
    if rounded:
        weights, dtype = [weight for weight, _ in rounded], rounded[0][1]
        yield finding_of(
            "warning" if trace.setup.profile.kind == "cpu" else "error",
            f"the scales of {counted(weights, 'quantized weight')} are {dtype_name(dtype)}",
            weights,
            phase="load",
            cause=f"the scales of {named(weights[0].module)} were cast to {dtype_name(dtype)}",
            fixes=(advice(weights[0].module, "load the model again, and keep every absmax in float32"),),
        )
