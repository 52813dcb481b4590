"""
**What it means.** Gradient checkpointing runs parts of the forward again during the backward. In this repeated
run, the operators get other dtypes than in the forward.

**Why it happens.** The forward ran under autocast, but a custom checkpointing function or hook does not switch autocast
on again for the second run. Or the weights were cast between forward and backward. Or `torch.set_default_dtype` was set only
for the forward, and a layer creates tensors without a dtype (Lightning's `precision="bf16-true"`).

**An example that fails**

    class Checkpoint(torch.autograd.Function):
        def backward(ctx, grad):
            with torch.enable_grad():
                output = ctx.layer(*ctx.inputs)     # autocast is off here

**Repaired**

    torch.utils.checkpoint.checkpoint(layer, *inputs, use_reentrant=False)   # restores autocast

**How safe is the fix?** PyTorch's `checkpoint` only restores the autocast state, so the second run computes the same values.

**Seen in** pytorch/pytorch #193338, #71124; NVIDIA/TransformerEngine #791; NVIDIA-NeMo/Automodel #2083 (default dtype).
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.core.dtypes import dtype_name
from isotype.core.names import grouped, short
from isotype.records.finding import Finding, Fix
from isotype.records.trace import Call, Trace
from isotype.rules.kit.contract_rule import contract_rule
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.words import advice, device_error, setting

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
    cause = f"the forward ran, but its recomputation raises {failure.error}"
    if failure.error.startswith("CheckpointError"):
        how = "let the forward and its recomputation run the same code: flags, adapters and random branches must not change before the backward ends"
        if (pair := _first_difference(trace)) is not None:
            before, after = pair
            place, results = short(after.source), [_described(call) for call in pair]
            cause = f"{after.op.split('.')[1]} at {place} returns {results[0]} in the forward and {results[1]} in the recomputation"
            if not after.operands and before.results[0][1] == after.results[0][1]:
                cause += ": torch's default dtype has changed in between"
                how = (
                    f"pass the dtype at {place}, or keep torch.set_default_dtype until the backward has ended"
                )
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
        cause=cause,
        notes=(*((cached,) if trace.setup.autocast is not None else ()), *device_error(failure.error)),
        fixes=fixes,
        places=(failure.module,),
    )


def _first_difference(trace: Trace) -> tuple[Call, Call] | None:
    """Return the first operator whose result differs in dtype or shape: its call in the forward and in the recomputation."""
    calls = grouped((call for call in trace.calls if call.phase == "forward"), lambda call: call.module)
    forward = {module: iter(of_module) for module, of_module in calls.items()}
    # Without a module, only operators that create tensors are certain to belong to a recomputation.
    again = (
        call for call in trace.calls if call.recomputed or (call.phase == "backward" and not call.operands)
    )
    for after in again:
        following = forward.get(after.module, iter(()))
        before = next(
            (call for call in following if (call.op, call.source) == (after.op, after.source)), None
        )
        if before is not None and before.results != after.results:
            return before, after
    return None


def _described(call: Call) -> str:
    return ", ".join(f"{dtype_name(dtype)} {list(shape)}" for dtype, shape in call.results)
