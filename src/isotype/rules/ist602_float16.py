"""float16 on a device without fast float16 matmuls

**What it means.** The step computes in float16, but the device has no fast float16 matmuls. Examples are most CPUs, and NVIDIA GPUs of
compute capability 6.1 and 5.x.

**Why it is bad.** A CPU without AVX512-FP16, AMX-FP16 or Arm FP16 converts every operand in software. On a CPU with AVX2, float16 matmuls
ran 36 times slower than float32 matmuls. On a CPU with AVX512-BF16, a step of LoRA on a 135M model took 65 seconds in float16, and 2
seconds in bfloat16. On a CPU with AMX, float16 is as slow as float32, and bfloat16 is three times faster.

**Why it happens.** A script for a GPU, with `fp16=True` or a float16 checkpoint, is tested on a CPU.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)      # on a CPU

**Repaired**

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)      # bfloat16 where it is native

**How safe is the fix?** A step in float32 is safe. A step in bfloat16 is safe if no frozen weight is float16. A cast of frozen float16
weights to bfloat16 is unsafe, because it loses three of their eleven significant bits.

**Seen in** LoRA trainings on CPUs; reports of slow float16 matmuls in the issues of pytorch/pytorch.
"""

import torch

from isotype.records.trace import Trace
from isotype.rules.kit import slow_dtype
from isotype.rules.kit.findings import Findings


def find(trace: Trace) -> Findings:
    return slow_dtype.find(trace, torch.float16, torch.bfloat16)
