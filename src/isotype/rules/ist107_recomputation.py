"""A recomputation in other dtypes than the forward

**What it means.** Gradient checkpointing runs parts of the forward again in the backward. In this recomputation, operators get other dtypes
than in the forward. Non-reentrant checkpointing then raises an error. With `use_reentrant=True`, no error is raised, but the gradients
belong to another forward than the loss.

**Why it happens.** The forward ran under autocast, but a custom checkpointing function or hook does not enable autocast for the
recomputation. In other cases, code casts the weights between forward and backward. In others, `torch.set_default_dtype` applies only to the
forward (Lightning's `precision="bf16-true"`), and a layer creates tensors without an explicit dtype.

**An example that fails**

    class Checkpoint(torch.autograd.Function):
        def backward(ctx, grad):
            with torch.enable_grad():
                output = ctx.layer(*ctx.inputs)     # autocast is off here

**Repaired**

    torch.utils.checkpoint.checkpoint(layer, *inputs, use_reentrant=False)   # restores autocast
    # cast weights only after the backward; keep torch.set_default_dtype until the backward has ended

**How safe is the fix?** The fix is safe: you edit the code so that the recomputation gets the autocast, weights and default dtype of the
forward. Forward and recomputation then compute the same values. A step without autocast is unsafe, because it computes in other dtypes.

**Seen in** pytorch/pytorch #193338, #71124; NVIDIA/TransformerEngine #791; NVIDIA-NeMo/Automodel #2083 (default dtype).
"""

from dataclasses import replace

from isotype.core.dtypes import FLOATS, dtype_name
from isotype.core.names import grouped, short
from isotype.records.finding import Finding, Fix
from isotype.records.trace import Call, Trace
from isotype.rules.kit import contract_rule
from isotype.rules.kit.findings import Findings, advice, finding_after, finding_at, setting
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.weight_sets import repacked
from isotype.rules.kit.words import device_error

_HEADLINE = "{given} instead of {expected} while gradient checkpointing recomputes the forward"
CLAIMS = (Claim("phase", lambda broken: broken.call.recomputed, _HEADLINE, settled=False),)

_ON_AGAIN = "recompute under the autocast of the forward: decorate the function's forward and backward with torch.amp.custom_fwd and custom_bwd, or call torch.utils.checkpoint.checkpoint"
_SAME_CODE = "make the recomputation run the same code as the forward: flags, adapters and random branches must not change before the backward ends"


def find(trace: Trace) -> Findings:
    for finding in contract_rule.find(__name__, trace):
        yield _with_autocast(trace, finding)
    failure, difference = trace.failure, _difference(trace)
    if failure is None and difference is not None and difference[2]:
        call, cause, how = difference
        message = (
            "gradient checkpointing recomputes the forward in another dtype, and nothing raises an error"
        )
        yield finding_at("warning", message, [call], cause=cause, fixes=(advice("checkpoint", how),))
    if failure is None or not failure.recomputed or repacked(trace):
        return  # IST407 reports repacked weights
    cause = f"the forward ran, but its recomputation raises {failure.error}"
    if failure.error.startswith("CheckpointError"):
        _, cause, by_default = difference or (None, cause, "")
        fixes: tuple[Fix, ...] = (advice("checkpoint", by_default or _SAME_CODE),)
    else:
        how = "disable autocast's cache (torch.autocast(…, cache_enabled=False)), or call checkpoint() without context_fn (context_fn makes checkpointing selective)"
        fixes = (
            setting("run the step without autocast", "autocast", "None", safe=False),
            advice("autocast cache", how, "cache_enabled=False"),
        )
    cached = "in the forward, autocast casts a weight once and caches the result; in the recomputation, autocast casts the weight again"
    message = "the recomputation of gradient checkpointing differs from the forward"
    notes = (*((cached,) if trace.setup.autocast is not None else ()), *device_error(failure.error))
    yield finding_after("error", message, failure, cause=cause, notes=notes, fixes=fixes)


def _with_autocast(trace: Trace, finding: Finding) -> Finding:
    """Return the finding with another cause and one more fix if autocast was on in the forward and off in the recomputation."""
    calls = (call for call in trace.breaches() if call.recomputed and call.source == finding.source)
    if trace.setup.autocast is None or any(call.autocast is not None for call in calls):
        return finding
    cause = (
        f"autocast to {dtype_name(trace.setup.autocast)} is on in the forward, and off in the recomputation"
    )
    fixes = (advice("autocast", _ON_AGAIN, "custom_bwd"), *finding.fixes)
    return replace(finding, cause=cause, notes=(finding.cause, *finding.notes), fixes=fixes)


def _difference(trace: Trace) -> tuple[Call, str, str] | None:
    """Return the first operator whose recomputed dtype or shape differs, the cause, and a fix ("" if there is
    none)."""
    # The recomputation also calls operators that the forward does not call (`detach` of saved tensors).
    calls = grouped((call for call in trace.calls if call.phase == "forward"), _kind)
    forward = {kind: iter(of_kind) for kind, of_kind in calls.items()}
    # Without a module, only operators that create tensors in the default dtype count as recomputation.
    again = (c for c in trace.calls if c.recomputed or (c.phase == "backward" and c.by_default))
    for after in again:
        before = next(forward.get(_kind(after), iter(())), None)
        if before is None or not (before.results and after.results) or before.results == after.results:
            continue  # a call that raised has no results
        place, (was, now) = short(after.source), (_described(call) for call in (before, after))
        cause = (
            f"{after.op.split('.')[1]} at {place} returns {was} in the forward and {now} in the recomputation"
        )
        (first, shape), (second, other) = before.results[0], after.results[0]
        floats = first != second and {first, second} <= FLOATS
        if not (floats and shape == other and before.by_default and after.by_default):
            return after, cause, ""
        how = f"pass the dtype at {place}, or restore torch's default dtype only after the backward"
        return after, f"{cause}: torch's default dtype has changed after the forward", how
    return None


def _kind(call: Call) -> tuple[str, str, str]:
    return call.module, call.op, call.source


def _described(call: Call) -> str:
    return ", ".join(f"{dtype_name(dtype)} {list(shape)}" for dtype, shape in call.results)
