"""Old casts of weights after an optimizer step

**What it means.** A forward uses the values that the weights had before the last optimizer step, because autocast has cached 16-bit casts
of them.

**Why it happens.** autocast casts a float32 weight once and caches the result until the outermost `with torch.autocast(…)` ends. If this
`with` contains the whole loop with its optimizer steps, the cached casts are never updated.

**Why it is bad.** The optimizer changes the float32 weights, but matmuls use the old casts. Every step computes the gradient for the values
that the weights had at the start. The loss varies with the batches and does not fall.

**An example that fails**

    with torch.autocast("cuda", torch.bfloat16):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()

**Repaired**

    for batch in loader:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()

**How safe is the fix?** The fix is safe: autocast casts the weights again after each step.

**Seen in** X-GenGroup/Flow-Factory #186.
"""

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice


def find(trace: Trace) -> Findings:
    if trace.stale_casts:
        message = "a forward computes with the weights from before the optimizer's step"
        cause = "autocast is on around the forward and the step, and caches casts until its region ends"
        notes = ("a weight that the step has updated has its old value in a later forward",)
        how = "leave the autocast region before optimizer.step(), in each iteration"
        yield Finding("error", message, cause=cause, notes=notes, fixes=(advice("autocast", how),))
