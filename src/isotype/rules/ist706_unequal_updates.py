"""Processes that update their weights differently

**What it means.** The processes of a training update their weights differently, for one of these reasons:

- The last forward before the optimizer's step ran under DDP's `no_sync()`, so DDP has not averaged the gradients of this forward.
- A `torch.amp.GradScaler` trains a model that FSDP1 has sharded. Each process then has only a part of the gradients, and its GradScaler
  searches only this part for infinite values.

**Why it happens.** With gradient accumulation, `no_sync()` should cover all micro-batches of a step except the last one. The condition in
the code is wrong: `step % n == 0` in place of `(step + 1) % n == 0`. The second reason applies to code that does not use FSDP1's
ShardedGradScaler.

**Why it is bad.** No error is raised. After a step without averaged gradients, each process trains another model, and a checkpoint contains
the model of only one process. If only some GradScalers find an infinite gradient, only their processes skip the step. The parts of a
sharded model then no longer fit together, and the loss scales differ.

**An example that costs**

    for step, batch in enumerate(batches):
        with contextlib.nullcontext() if step % 4 == 0 else model.no_sync():
            model(**batch).loss.backward()
        if (step + 1) % 4 == 0:
            optimizer.step()

**Repaired**

        with contextlib.nullcontext() if (step + 1) % 4 == 0 else model.no_sync():
    scaler = torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler()      # for FSDP1

**What is not reported.** Only `isotype run` reports this finding. The rule ignores steps for which the script itself averages gradients
(`torch.distributed.all_reduce`). It also ignores FSDP2, because torch's GradScaler then searches the gradients of all processes.

**How safe is the fix?** The fix is safe: all processes then make the same update.

**Seen in** modelscope/FunASR #3472; facebookresearch/fairscale #421; huggingface/picotron #5.
"""

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice

_REASONS = {
    "no_sync": (
        "DDP has not averaged the gradients, so each process updates its weights with other gradients",
        "the last forward before this step ran under no_sync()",
        "leave no_sync() before the last micro-batch of each step",
    ),
    "scaler": (
        "each process decides alone whether it skips a step with infinite gradients",
        "torch.amp.GradScaler searches only the gradients of its process, and FSDP1 has sharded the gradients",
        "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    ),
}


def find(trace: Trace) -> Findings:
    reason, line = trace.unequal
    if reason:
        message, cause, how = _REASONS[reason]
        fixes = (advice(reason, how),)
        yield Finding("error", message, phase="optimizer", source=line, cause=cause, fixes=fixes)
