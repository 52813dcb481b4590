"""
**What it means.** The step computes in float16, but the device has no fast float16 matmuls. Such devices are most CPUs,
and NVIDIA GPUs of compute capability 6.1 and 5.x.

**Why it is bad.** A CPU without AVX512-FP16, AMX-FP16 or Arm FP16 converts every operand in software. On a CPU with
AVX2, float16 matmuls ran 36 times slower than float32 matmuls. On a CPU with AVX512-BF16, float16 matmuls ran 40 times
slower than bfloat16 matmuls: a step of LoRA on a 135M model took 65 seconds instead of 2. On a CPU with AMX, float16
runs as fast as float32, and three times slower than bfloat16. float16 also needs loss scaling.

**Why it happens.** A script for a GPU, with `fp16=True` or a float16 checkpoint, is tested on a CPU.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)      # on a CPU

**Repaired**

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)      # bfloat16 where it is native

**The estimate.** For CPUs, the rule computes the matmuls' time from measured rates. For devices whose rates come from a
data sheet, the rule uses a roofline model that counts float16 matmuls at float32's rate. The rule reports float16
matmuls that take at least 1 % of the time of all matmuls, even if their share of the FLOPs is smaller.

**How safe is the fix?** A cast to float32 is safe. A cast of float16 weights to bfloat16 is unsafe, because it loses three
bits.

**Seen in** LoRA runs on CPUs; pytorch/pytorch reports of slow half matmuls.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isotype.records.finding import Finding, Kind
from isotype.records.trace import Trace
from isotype.rules.kit import slow_dtype

TITLE = "float16 on a device without fast float16"
KIND: Kind = "device"


def find(trace: Trace) -> Iterator[Finding]:
    return slow_dtype.find(trace, torch.float16, torch.bfloat16)
