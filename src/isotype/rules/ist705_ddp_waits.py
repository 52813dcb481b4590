"""Parameters without a gradient under DDP

**What it means.** DDP averages the gradient of every trainable parameter over the processes. However, a parameter gets no gradient from
some batch: the batch does not run the module of the parameter, or the loss does not depend on the module's result.

**Why it happens.** Rows with only text do not run the vision tower, but the adapters of the tower are trained. In other cases, the forward
never calls a trained layer or head. The next step raises `Expected to have finished reduction in the prior iteration before starting a new
one`, or the processes hang.

**An example that fails**

    model = get_peft_model(vision_language_model, LoraConfig(target_modules="all-linear"))     # the tower's layers too
    DistributedDataParallel(model)(**text_alone).loss.backward()       # the next step raises the error

**Repaired**

    DistributedDataParallel(model, find_unused_parameters=True)        # or train only what every batch uses

**What is not reported.** The rule reports nothing if `find_unused_parameters` is True. TrainingArguments sets `find_unused_parameters` to
True by default, except with gradient checkpointing.

**How safe is the fix?** The fix is safe: DDP uses zero for a missing gradient, so the weights get the same updates as in a training with
one process. The search for unused parameters makes each step a little slower.

**Seen in** huggingface/trl #6617; hiyouga/LlamaFactory #5680, #6376; huggingface/peft #393.
"""

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, reach_of
from isotype.rules.kit.words import and_others

_REFUSAL = "DDP raises: Expected to have finished reduction in the prior iteration before starting a new one"


def find(trace: Trace) -> Findings:
    setup = trace.setup
    missing = reach_of(trace).ungraded
    if setup.devices < 2 or setup.fsdp or setup.deepspeed or setup.find_unused or not missing:
        return
    how = "set find_unused_parameters=True, or train only what every batch uses"
    yield Finding(
        "error",
        f"DDP waits for the gradients of {and_others(missing)}, but at least one batch computes no such gradient",
        module=missing[0].rpartition(".")[0],
        phase="backward",
        cause="DDP averages every trainable parameter's gradient over the processes in every step",
        notes=(_REFUSAL,),
        fixes=(advice("ddp_find_unused_parameters", how),),
        places=missing[:8],
    )
