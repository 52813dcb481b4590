"""GradScaler without float16

**What it means.** A GradScaler runs in a step that does not use float16, or it gets the gradients of bfloat16 parameters. A GradScaler
multiplies the loss, because small gradients would become zero in float16. bfloat16 and float32 represent numbers down to 1e-38, so they
need no loss scaling.

**Why it is bad.** On CUDA, a trainable bfloat16 parameter ends the run with `"_amp_foreach_non_finite_check_and_unscale_cuda" not
implemented for 'BFloat16'`. In other steps, a GradScaler has no benefit, but it skips steps whose scaled gradients are infinite.

**An example that fails**

    trainer = SFTTrainer(args=SFTConfig(fp16=True), ...)   # adapters were cast to bfloat16
    trainer.train()

**Repaired**

    SFTConfig(bf16=True)                                   # no GradScaler
    # if the device has no bfloat16: keep fp16=True, and cast the adapters to float32

**How safe is the fix?** The fix is safe, because a bfloat16 training has the same gradients without a GradScaler. A cast of the parameters
from bfloat16 to float32 keeps every value.

**Seen in** huggingface/trl #4901; pytorch/pytorch #127176; Comfy-Org/ComfyUI #13124; AttentionX/InstructBLIP_PEFT #3;
unslothai/unsloth #4005.
"""

import torch

from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, finding_of, setting
from isotype.rules.kit.weight_sets import counted, float32_masters, trained
from isotype.rules.kit.words import device_error

_REFUSAL = "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
_ACCEPTED = "GradScaler raises an error for bfloat16 gradients on CUDA, but not on this device; bfloat16 needs no loss scaling"


def find(trace: Trace) -> Findings:
    setup = trace.setup
    if not setup.scaler or "unscale" not in setup.phases:
        return
    without = setting("train without a GradScaler", "scaler", "False")
    fp16 = torch.float16 in (setup.autocast, setup.compute)
    low = trained(trace, torch.bfloat16)
    if low:
        cuda = setup.profile.kind in ("cuda", "rocm")
        masters = float32_masters(trace, low)
        yield finding_of(
            "error" if cuda else "warning",
            f"GradScaler gets the bfloat16 gradients of {counted(low, 'trainable parameter')}",
            low,
            phase="unscale",
            op="GradScaler.unscale_",
            notes=device_error(_REFUSAL) if cuda else (_ACCEPTED,),
            fixes=(*masters, without) if fp16 else (without, *masters),
        )
    elif not fp16 and trained(trace) and torch.float16 not in trace.flops:
        message = "a GradScaler runs, but nothing is computed in float16"
        cause = "scaler=True"
        yield finding_of("warning", message, trained(trace), cause=cause, phase="unscale", fixes=(without,))
