"""Trainable parameters in another dtype than the policy's master dtype

**What it means.** Trainable parameters do not have the master dtype. The precision policy requests this dtype for all trainable parameters.
The cause may be a trainer's cast. For example, TRL casts every trainable parameter of a quantized model to bfloat16. The code that loads a
model may also cast parameters to float32. PEFT may create adapters in the dtype of the base model.

**Why it is bad.** A 16-bit parameter loses small updates (IST801). A 32-bit parameter takes twice the memory of a 16-bit parameter. Under
float16 autocast, bfloat16 parameters provide only 8 of the 11 significant bits that float16 matmuls use.

**An example that fails**

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)

**Repaired**

    trainer.add_callback(isotype.PrecisionCallback())      # casts to the model's policy when training begins

**How safe is the fix?** A cast of 16-bit parameters to float32 is safe, because float32 keeps every value. A cast to a narrower master
dtype is safe only if that dtype represents every value.

**Seen in** huggingface/trl #1644; unslothai/unsloth #4005; huggingface/peft #2421; axolotl-ai-cloud/axolotl #3310.
"""

import torch

from isotype.core.dtypes import dtype_name
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, finding_of
from isotype.rules.kit.weight_sets import cast_fix, count, float32_masters, is_exact, trained


def find(trace: Trace) -> Findings:
    setup = trace.setup
    if setup.policy is None:
        master = torch.float32
        # With a scaler it is IST302, which is more specific.
        mismatch = setup.autocast == torch.float16 and not setup.scaler
        wrong = trained(trace, torch.bfloat16) if mismatch else ()
    else:
        master = setup.policy.master
        wrong = tuple(weight for weight in trained(trace) if weight.dtype != master and not weight.pinned)
    if not wrong:
        return
    dtypes = " and ".join(sorted({dtype_name(weight.dtype) for weight in wrong}))
    exact = ", in which every value is exact" if is_exact(wrong, master) else ""
    cast = cast_fix(f"cast the trainable parameters to {dtype_name(master)}{exact}", wrong, master)
    yield finding_of(
        "warning",
        f"{count(wrong)} of {count(trained(trace))} trainable parameters are not in the master dtype "
        f"{dtype_name(master)}: {dtypes}",
        wrong,
        phase="optimizer",
        fixes=float32_masters(trace, wrong) if master == torch.float32 else (cast,),
    )
