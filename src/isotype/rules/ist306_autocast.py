"""
**What it means.** The step runs under autocast to another dtype than the policy's compute dtype: a trainer
set `fp16=True` by itself, or a flag was not passed on.

**Why it is bad.** The run is not the requested one. float16 in place of bfloat16 overflows above 65504;
bfloat16 in place of float16 is emulated in software on devices without bfloat16.

**An example that fails**

    TrainingArguments(fp16=not args.cpu)                     # --bf16 was given

**Repaired**

    TrainingArguments(bf16=args.bf16, fp16=args.fp16)

**How safe is the fix?** The step then follows the policy; the numbers differ by the rounding of the two dtypes.

**Seen in** oobabooga/textgen #3460; huggingface/trl #3598.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.core.dtypes import dtype_name
from isotype.records.finding import Action, Finding, Fix
from isotype.records.trace import Trace

TITLE = "Autocast in another dtype than the policy's"


def find(trace: Trace) -> Iterator[Finding]:
    """Yield an autocast dtype that is not the policy's compute dtype."""
    setup = trace.setup
    if setup.policy is None or setup.autocast is None or setup.autocast == setup.policy.compute:
        return
    wanted = setup.policy.autocast
    value = "None" if wanted is None else dtype_name(wanted)
    actions = (
        Action("setting", "autocast", value),
        Action("setting", "scaler", str(setup.policy.loss_scaling)),
    )
    yield Finding(
        "IST306",
        "warning",
        f"autocast is set to {dtype_name(setup.autocast)}, the policy computes in {dtype_name(setup.policy.compute)}",
        cause=f"autocast to {dtype_name(setup.autocast)}",
        fixes=(Fix(f"set autocast to {value}", "safe", actions=actions),),
    )
