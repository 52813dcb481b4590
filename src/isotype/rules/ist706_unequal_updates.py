"""
**What it means.** The processes of a training update their weights differently:

- The last forward before the optimizer's step ran under DDP's `no_sync()`, so DDP has not averaged its gradients.
- A GradScaler that does not communicate scales the loss of an FSDP1 model. Each process has other gradients and searches
  only these for infinite values.

**Why it happens.** With gradient accumulation, the condition of `no_sync()` selects the wrong micro-batch: `step % n == 0`
in place of `(step + 1) % n == 0`. Or `torch.amp.GradScaler` is used in place of FSDP1's ShardedGradScaler.

**Why it is bad.** No error is raised. After a step with gradients of one process, each process trains another model, and a
checkpoint contains the model of one process. If only some GradScalers find an infinite gradient, only their processes skip
the step: the parts of a sharded model no longer fit together, and the loss scales differ.

**An example that costs**

    for step, batch in enumerate(batches):
        with contextlib.nullcontext() if step % 4 == 0 else model.no_sync():
            model(**batch).loss.backward()
        if (step + 1) % 4 == 0:
            optimizer.step()

**Repaired**

        with contextlib.nullcontext() if (step + 1) % 4 == 0 else model.no_sync():

**What is not reported.** Steps for which the script itself averages gradients (`torch.distributed.all_reduce`). FSDP2, whose
gradients torch's GradScaler searches in all processes. Only `isotype run` reports this finding.

**How safe is the fix?** The fix is safe: all processes make the same update.

**Seen in** modelscope/FunASR #3472; facebookresearch/fairscale #421; huggingface/picotron #5.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.words import advice

TITLE = "Processes that update their weights differently"

_REASONS = {
    "no_sync": (
        "DDP has not averaged the gradients: each process updates its weights with other gradients",
        "the last forward before this step ran under no_sync()",
        "leave no_sync() before the last micro-batch of each step",
    ),
    "scaler": (
        "each process decides alone if it skips a step with infinite gradients",
        "torch.amp.GradScaler searches only the gradients of its process, and FSDP1 has sharded the gradients",
        "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    ),
}


def find(trace: Trace) -> Iterator[Finding]:
    reason, line = trace.unequal
    if reason:
        message, cause, how = _REASONS[reason]
        fixes = (advice(reason, how),)
        yield Finding("error", message, phase="optimizer", source=line, cause=cause, fixes=fixes)
