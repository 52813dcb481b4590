"""
**What it means.** Gradient checkpointing runs parts of the forward again during the backward. In this repeated
run, the operators get other dtypes than in the forward.

**Why it happens.** The forward ran under autocast, but a custom checkpointing function or hook does not switch autocast
on again for the second run. Or the weights were cast between forward and backward.

**An example that fails**

    class Checkpoint(torch.autograd.Function):
        def backward(ctx, grad):
            with torch.enable_grad():
                output = ctx.layer(*ctx.inputs)     # autocast is off here

**Repaired**

    torch.utils.checkpoint.checkpoint(layer, *inputs, use_reentrant=False)   # restores autocast

**How safe is the fix?** PyTorch's `checkpoint` only restores the autocast state, so the second run computes the same values.

**Seen in** pytorch/pytorch #193338, #71124; NVIDIA/TransformerEngine #791.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Finding, Fix
from isotype.records.trace import Trace
from isotype.rules.kit.contract_rule import contract_rule
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.words import advice, setting

TITLE = "Recomputation in other dtypes than the forward"
CLAIMS = (Claim("phase", lambda broken: broken.call.recomputed, settled=False),)

_mismatches = contract_rule(
    __name__, "{given} instead of {expected} while gradient checkpointing recomputes the forward"
)


def find(trace: Trace) -> Iterator[Finding]:
    yield from _mismatches(trace)
    failure = trace.failure
    if failure is None or not failure.recomputed:
        return
    if failure.error.startswith("CheckpointError"):
        how = "let the forward and its recomputation run the same code: flags, adapters and random branches must not change before the backward ends"
        fixes: tuple[Fix, ...] = (advice("checkpoint", how),)
    else:
        how = "do not save cached casts: torch.autocast(…, cache_enabled=False), or checkpoint without context_fn (selective checkpointing)"
        fixes = (
            setting("run the step without autocast", "autocast", "None", "unsafe"),
            advice("autocast cache", how, "cache_enabled=False"),
        )
    cached = "in the forward, autocast casts a weight once and caches it; in the recomputation, autocast casts it again"
    yield Finding(
        severity="error",
        message="the recomputation of gradient checkpointing differs from the forward",
        module=failure.module,
        phase=failure.phase,
        source=failure.source,
        cause=f"the forward ran, but its recomputation raises {failure.error}",
        notes=(cached,) if trace.setup.autocast is not None else (),
        fixes=fixes,
        places=(failure.module,),
    )
