"""bfloat16 on a device without bfloat16 hardware

**What it means.** The step computes in bfloat16, but the device has no hardware for bfloat16 matmuls.

**Why it is bad.** On NVIDIA GPUs before compute capability 8.0 (T4, V100, RTX 20xx), bfloat16 runs without tensor cores and is at most as
fast as float32. float16 is several times faster. Some kernels (flash attention, Triton's `tl.dot`) do not accept bfloat16 on these GPUs. If
a device has no bfloat16 matmul at all (P100, GTX 10xx), the step crashes.

**Why it happens.** A script for newer hardware sets `bf16=True`, loads a bfloat16 checkpoint without a cast, or has a quantization config
with `bnb_4bit_compute_dtype=torch.bfloat16`.

**An example that costs**

    SFTConfig(bf16=True)                      # on a T4

**Repaired**

    SFTConfig(fp16=True)                      # float16 autocast with a GradScaler, float32 adapters

**How safe is the fix?** A step in float32 is safe. If no frozen weight is bfloat16, float16 autocast with a GradScaler is safe, too. A cast
of frozen bfloat16 weights to float16 is unsafe, because models that were trained in bfloat16 (Gemma, T5) may exceed 65,504, the largest
float16 number. Watch the loss.

**Seen in** huggingface/peft #1249; unslothai/unsloth-zoo #706; huggingface/trl #6516; hiyouga/LlamaFactory #2090;
Dao-AILab/flash-attention #762; reports of T4 and V100 users of every trainer.
"""

import torch

from isotype.core.names import grouped, short
from isotype.records.trace import Trace
from isotype.rules.kit import slow_dtype
from isotype.rules.kit.findings import Findings, finding_at
from isotype.rules.kit.words import place

# Overloads with a result dtype.
_WIDE_RESULTS = ("aten.mm.dtype", "aten.bmm.dtype", "aten.addmm.dtype", "aten.baddbmm.dtype")


def find(trace: Trace) -> Findings:
    profile = trace.setup.profile
    if profile.kind == "cuda" and profile.supports(torch.bfloat16) == "emulated":
        yield from _wide_results(trace)
    yield from slow_dtype.find(trace, torch.bfloat16, torch.float16)


def _wide_results(trace: Trace) -> Findings:
    """Yield a finding for each line with a bfloat16 matmul that returns float32. Old GPUs raise an error for this matmul."""
    run = (call for call in trace.calls if call.op.startswith(_WIDE_RESULTS) and call.breach is None)
    wide = (call for call in run if torch.bfloat16 in (operand.dtype for operand in call.operands))
    for calls in grouped(wide, place).values():
        first = calls[0]
        batch = next(shape[0] for _, shape in first.results)
        kernel = "bgemm" if "bmm" in first.op and batch > 1 else "gemm"  # in CUDABlas.cpp
        refusal = f"torch raises: {kernel} input type at::BFloat16 and output type float is only supported for CUDA devices with compute capability 8.0 or higher"
        yield finding_at(
            "error",
            f"{trace.setup.profile.title} does not support bfloat16 matmuls with a float32 result",
            calls,
            cause=f"a product of bfloat16 operands has a float32 result at {short(first.source)}",
            notes=(refusal,),
            fixes=slow_dtype.fixes(trace, torch.bfloat16, torch.float16),
        )
