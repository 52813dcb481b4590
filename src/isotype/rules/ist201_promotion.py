"""Matmuls in a wider dtype than the compute dtype

**What it means.** Matmuls run in a wider dtype than the compute dtype. No error is raised, because all operands of such a matmul have the
same wide dtype. However, the device is slower in this wide dtype.

**Why it is bad.** On a GPU with tensor cores, a float32 matmul without TF32 runs at 1/8 to 1/30 of the rate of a 16-bit matmul. Attention
in float32 has no flash kernel. Every float32 operand takes twice the memory of a 16-bit operand.

**Why it happens.** A float32 embedding, norm or head makes the hidden states float32 (as after `prepare_model_for_kbit_training`). A
float32 input has the same effect, and so has a `.float()` in a custom layer. A quantized layer casts a float32 input to the layer's compute
dtype, and casts the result back to float32.

**An example that costs**

    model = prepare_model_for_kbit_training(model)     # embeddings, norms and lm_head become float32
    model(**batch)                                     # attention and lm_head then run in float32

**Repaired**

    isotype.enforce(model, policy)     # casts back to the policy's dtypes; policy: see isotype.resolve_precision

**What is not reported.**

- matmuls of tensors that autocast computes in float32, of adapters, of the optimizer's step, and of routers (IST806);
- quantized layers with a wide compute dtype (IST404);
- matmuls in TRL's fused loss, and matmuls of tensors that transformers' code of a model casts to float32;
- matmuls on a device without instructions for the compute dtype (IST601, IST602), because float32 is faster there;
- matmuls with less than 2 % of the step's FLOPs, unless they slow down the step by a factor of 1.1 or more.

**How safe is the fix?** Autocast is a safe fix, and so are casts of outputs. They change no stored weight. A cast of a weight to a narrower
dtype is safe only if that dtype represents every value of the weight.

**Seen in** huggingface/transformers #25598; bitsandbytes #1515, #1569; unslothai/unsloth #1186.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from isotype.core.dtypes import FLOATS, HALVES, dtype_name
from isotype.core.names import base_name, plural
from isotype.records.finding import Action, Cost, Finding, Fix
from isotype.records.trace import Call, Operand, Origin, Trace, Weight
from isotype.rules.ist806_router import router_products
from isotype.rules.kit import costs
from isotype.rules.kit.contract_fixes import candidates
from isotype.rules.kit.findings import Findings, Fixes, actions, finding_at, places
from isotype.rules.kit.groups import Group, distinct
from isotype.rules.kit.weight_sets import is_exact, names
from isotype.rules.kit.words import TRANSFORMERS, and_others, cause_text, evidence

_OF_TRL = "/trl/kernels/"
"""TRL's fused head accumulates its gradients in float32. On a GPU, the matmuls of this head stay in 16 bits."""
_LEAST_SHARE = 0.02
_LEAST_SLOWDOWN = 1.1


@dataclass(frozen=True)
class _Wide:
    """A matmul in a dtype that is too wide, with the operand that causes the dtype, and the origins of all wide operands."""

    call: Call
    mismatched: Operand
    roots: tuple[Origin, ...]


def find(trace: Trace) -> Findings:
    compute = trace.setup.compute
    native = trace.setup.profile.supports(compute) == "native"  # elsewhere float32 is no slower
    if trace.failure is not None or compute not in HALVES or not native:
        return
    for group in _groups(trace):
        cost = _cost(trace, [wide.call for wide in group])
        if cost.flops_share >= _LEAST_SHARE or (cost.slowdown or 1.0) >= _LEAST_SLOWDOWN:
            yield _finding(trace, group, cost)


def _groups(trace: Trace) -> list[list[_Wide]]:
    """Group the matmuls that run in a wide dtype by their cause. The forward and the backward of a line are in the same group."""
    groups: dict[tuple[str, ...], list[_Wide]] = {}
    by_module: dict[tuple[str, str], tuple[str, ...]] = {}
    # These are wide on purpose: adapters, quantized layers (see IST404), and layers with large values (`by_ranges`).
    exempt = {weight.module for weight in trace.weights if weight.adapter or weight.quantization is not None}
    exempt |= {call.module for call in trace.calls if base_name(call.module) in trace.by_ranges}
    broken = {call.module for call in trace.breaches()}
    routers = {(product.module, product.source) for product, _, _ in router_products(trace)}
    for call in trace.calls:
        if (call.module, call.source) in routers or call.module in broken or call.phase == "optimizer":
            continue  # other rules report routers and broken contracts; an update in float32 loses no digits
        wide = _wide(trace, call, exempt)
        if wide is None:
            continue
        place = (call.module, call.source)
        key = by_module.get(place) if call.phase == "backward" else None
        key = key or _key(wide, trace.owners)
        by_module.setdefault(place, key)
        groups.setdefault(key, []).append(wide)
    return list(groups.values())


def _is_adapter_weight(operand: Operand, owners: Mapping[str, Weight]) -> bool:
    weight = owners.get(operand.origin.name) if operand.origin.kind == "parameter" else None
    return weight is not None and weight.adapter and sorted(weight.shape) == sorted(operand.shape)


def _wide(trace: Trace, call: Call, exempt: set[str]) -> _Wide | None:
    compute, dtype = trace.setup.compute, call.run_dtype
    if dtype not in FLOATS or dtype.itemsize <= compute.itemsize or call.breach or call.module in exempt:
        return None
    wide = [operand for operand in call.operands if operand.dtype == dtype]
    if wide and all(_is_adapter_weight(operand, trace.owners) for operand in wide):
        return None  # the product of two adapter weights, which a merge adds to the base weight
    if not wide or any(costs.by_autocast(operand.origin.cause) for operand in wide):
        return None
    roots = tuple(costs.root(operand.origin) for operand in wide)
    if _OF_TRL in call.source or any(c.kind == "cast" and TRANSFORMERS in c.source for c in roots):
        return None
    # Blame an input before a weight, and a wide origin before a narrow origin (of a wide gradient).
    order = sorted(
        range(len(wide)), key=lambda i: (roots[i].dtype != dtype, wide[i].origin.kind == "parameter")
    )
    flowing = order[0]
    return _Wide(call, wide[flowing], (roots[flowing], *roots))


def _key(wide: _Wide, owners: Mapping[str, Weight]) -> tuple[str, ...]:
    cause = wide.roots[0]
    if cause.kind in ("parameter", "buffer"):
        owner = owners.get(cause.name)
        return (cause.kind, owner.module_class if owner else "", cause.name.rpartition(".")[2])
    return (cause.kind, cause.name if cause.kind == "input" else cause.source)


def _cost(trace: Trace, calls: list[Call]) -> Cost:
    modules = {call.module for call in calls}
    moved = sum(cast.bytes for cast in costs.casts(trace) if cast.call.module in modules)
    slowdown = costs.slowdown(trace, calls, trace.setup.compute)
    return Cost(costs.flops_share(trace, calls), moved, slowdown=slowdown)


def _finding(trace: Trace, group: list[_Wide], cost: Cost) -> Finding:
    first, compute = group[0], trace.setup.compute
    cause = first.roots[0]
    wide, narrow = dtype_name(first.mismatched.dtype), dtype_name(compute)
    calls = tuple(wide.call for wide in group)
    roots = (root for wide in group for root in wide.roots if root.dtype == wide.mismatched.dtype)
    blamed = Group(calls, first.mismatched, distinct((cause, *roots)), compute, compute)
    number = plural(sum(call.repeats for call in calls), "matmul")
    return finding_at(
        "warning",
        f"{100 * cost.flops_share:.0f} % of the FLOPs run in {wide} instead of {narrow}",
        calls,
        cause=cause_text(cause, trace.owners),
        evidence=evidence(first.mismatched.origin),
        notes=(f"{number} in {plural(len(places(calls)), 'module')}", *costs.estimate(cost, trace)),
        fixes=tuple(_fixes(trace, blamed)),
        cost=cost,
    )


def _fixes(trace: Trace, group: Group) -> Fixes:
    """Yield the fixes. The first fix casts both weights and inputs, because a cast of only one of them causes a mismatch."""
    expected = dtype_name(trace.setup.compute)
    weights = group.weights(trace)
    inputs = [cause.name for cause in group.causes if cause.kind == "input"]
    frozen = names(weight for weight in weights if not weight.trainable)
    if frozen and inputs:
        text = f"cast {and_others(frozen)} and the model's inputs to {expected}"
        together = (*actions("parameter", frozen, expected), Action("input", "", expected))
        exact = is_exact(weights, trace.setup.compute)
        yield Fix(text, "safe" if exact else "unsafe", actions=together)
    yield from candidates(trace, group)
