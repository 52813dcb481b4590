"""Autocast to another dtype than the policy's compute dtype

**What it means.** The step runs under autocast, but to another dtype than the compute dtype of the precision policy. The rule also reports
a step without autocast if accelerate's `mixed_precision` requests autocast, or if earlier steps of an `isotype run` used it.

**Why it happens.** A trainer sets `fp16=True` by default, or the script does not pass its `--bf16` or `--fp16` flag to the trainer.
`unwrap_model(model, keep_fp32_wrapper=False)` removes accelerate's autocast from the forward.

**Why it is bad.**

- With float16 instead of bfloat16, numbers above 65,504 overflow.
- With bfloat16 instead of float16, the step is slow on devices that emulate bfloat16 in software.
- Without autocast, the step runs in float32. It is slower and takes more memory, but no error is raised.

**An example that fails**

    TrainingArguments(fp16=not args.cpu)                     # the user called the script with --bf16

**Repaired**

    TrainingArguments(bf16=args.bf16, fp16=args.fp16)

**How safe is the fix?** The fix is safe, because no stored weight changes. The results change slightly, because the step rounds to another
dtype.

**Seen in** oobabooga/textgen #3460; huggingface/trl #3598; huggingface/accelerate #2846.
"""

from isotype.core.dtypes import dtype_name
from isotype.records.finding import Action, Finding, Fix
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice


def find(trace: Trace) -> Findings:
    setup = trace.setup
    if trace.no_autocast:
        how = "call the model that accelerator.prepare() returned, unwrap it with keep_fp32_wrapper=True, or open accelerator.autocast() or torch.autocast around the forward"
        if trace.no_autocast.endswith("on a CPU"):
            how = "use bf16 on a CPU, or train on a GPU"
        message = "the step runs without autocast"
        yield Finding("warning", message, cause=trace.no_autocast, fixes=(advice("autocast", how),))
    if setup.policy is None or setup.autocast is None or setup.autocast == setup.policy.compute:
        return
    wanted, name = setup.policy.autocast, dtype_name(setup.autocast)
    value = "None" if wanted is None else dtype_name(wanted)
    scaler = Action("setting", "scaler", str(setup.policy.loss_scaling))
    fix = Fix(f"set autocast to {value}", "safe", actions=(Action("setting", "autocast", value), scaler))
    message = f"autocast is set to {name}, but the policy computes in {dtype_name(setup.policy.compute)}"
    yield Finding("warning", message, cause=f"autocast to {name}", fixes=(fix,))
