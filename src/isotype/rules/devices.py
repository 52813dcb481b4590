"""What IST601 and IST602 share: matmuls in a 16-bit dtype that the device does not run natively."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from isotype.dtypes import dtype_name
from isotype.rules import prices
from isotype.rules.finding import Action, Finding, Fix, Price
from isotype.rules.words import named, starred
from isotype.trace.record import Call, Trace, Weight

_LEAST_SHARE = 0.01


def find(trace: Trace, code: str, dtype: torch.dtype, other: torch.dtype) -> Iterator[Finding]:
    """Matmuls in `dtype` on a device without it; `other` is the 16-bit dtype to try instead."""
    profile = trace.setup.profile
    support = profile.supports(dtype)
    calls = [call for call in trace.calls if prices.run_dtype(call) == dtype]
    flops = sum(call.flops * call.repeats for call in calls)
    share = flops / max(1, prices.all_flops(trace))
    # A step that was not followed to a matmul is judged by what it was meant to run in.
    if support == "native" or (share < _LEAST_SHARE and (calls or trace.setup.compute != dtype)):
        return
    targets = _targets(trace, other)
    # Without a rate of its own an emulated dtype runs at float32's at best: that is what it is converted to.
    slower = prices.slowdown(trace, calls, (targets or [torch.float32])[0], stand_in=torch.float32)
    price = Price(flops_share=share, slowdown=slower)
    first = calls[0] if calls else None
    name = dtype_name(dtype)
    ran = "do not run" if support == "refused" else "do not run in hardware"
    yield Finding(
        code=code,
        severity="error" if support == "refused" else "warning",
        message=f"{name} matmuls {ran} on {profile.title}: {share:.0%} of the FLOPs"
        if calls
        else f"{name} matmuls {ran} on {profile.title}",
        module=first.module if first else "",
        op=first.op if first else "",
        phase=first.phase if first else "forward",
        source=first.source if first else "",
        cause=_cause(trace, dtype),
        notes=(profile.reason(dtype), *_estimate(price, trace)),
        fixes=fixes(trace, dtype, other),
        operands=first.operands if first else (),
        price=price,
        places=tuple(dict.fromkeys(call.module for call in calls)),
    )


def fixes(trace: Trace, dtype: torch.dtype, other: torch.dtype) -> tuple[Fix, ...]:
    """The whole step in `other` or in float32, whichever the device runs natively."""
    return tuple(_fix(trace, dtype, target) for target in _targets(trace, other))


def _targets(trace: Trace, other: torch.dtype) -> list[torch.dtype]:
    profile = trace.setup.profile
    return [target for target in (other, torch.float32) if profile.supports(target) == "native"]


def _estimate(price: Price, trace: Trace) -> Iterable[str]:
    if price.slowdown is None or price.slowdown < 1.005:
        return ()
    return (
        f"at least {price.slowdown:.2g} times the step time: a roofline with float32's rate in its place",
    )


def _cause(trace: Trace, dtype: torch.dtype) -> str:
    """Who asked for the dtype: autocast, a quantized layer, or the weights."""
    name, setup = dtype_name(dtype), trace.setup
    if setup.autocast == dtype:
        return f"autocast is set to {name}"
    plain = [w for w in trace.weights if w.dtype == dtype and not w.buffer and w.quantization is None]
    computing = [w for w in trace.weights if w.quantization is not None and w.quantization.compute == dtype]
    if computing:
        return f"the quantized layer {named(computing[0].module)} computes in {name}"
    if plain:
        return f"{plain[0].name} is {name}"
    return f"the step computes in {name}"


def _fix(trace: Trace, dtype: torch.dtype, target: torch.dtype) -> Fix:
    """The whole step in `target`: settings, weights, quantized layers."""
    name = dtype_name(target)
    plain = [w for w in trace.weights if w.dtype == dtype and w.quantization is None and not w.buffer]
    settings = (
        Action("setting", "autocast", "None" if target == torch.float32 else name),
        Action("setting", "scaler", str(target == torch.float16)),
        Action("setting", "compute", name),
    )
    given = (Action("input", "", name),) if _is_given(trace, dtype) else ()
    actions = (*settings, *(_cast(weight, target) for weight in plain), *_layers(trace, dtype, name), *given)
    lossless = target == torch.float32 or not any(not weight.trainable for weight in plain)
    scaler = " with a GradScaler" if target == torch.float16 else ""
    weights = " and cast the weights" if plain else ""
    return Fix(
        f"run the step in {name}{scaler}{weights}",
        "safe" if lossless else "unsafe",
        actions=tuple(dict.fromkeys(actions)),
    )


def _is_given(trace: Trace, dtype: torch.dtype) -> bool:
    """Whether an input of the model is in `dtype`: the casts of the weights leave it as it is."""
    return any(
        operand.dtype == dtype and operand.origin.kind == "input"
        for call in trace.calls
        for operand in call.operands
    )


def _layers(trace: Trace, dtype: torch.dtype, target: str) -> Iterator[Action]:
    """Compute dtypes and quantization states of quantized layers that say `dtype`."""
    for weight in trace.weights:
        state = weight.quantization
        if state is not None and state.compute == dtype:
            yield Action("compute", starred(weight.module), target)
        if state is not None and state.state == dtype:
            yield Action("state", starred(weight.module), target)


def _cast(weight: Weight, target: torch.dtype) -> Action:
    # What is trained gets float32 masters: a GradScaler takes no float16 gradients.
    to = torch.float32 if weight.trainable else target
    return Action("parameter", starred(weight.name), dtype_name(to))


def attention_calls(trace: Trace) -> dict[torch.dtype, list[Call]]:
    """The fused attention calls of the forward that broke no contract, by the dtype of their queries."""
    found: dict[torch.dtype, list[Call]] = {}
    for call in trace.calls:
        if call.phase == "forward" and call.operands and call.breach is None and _is_attention(call.op):
            found.setdefault(call.operands[0].dtype, []).append(call)
    return found


def _is_attention(op: str) -> bool:
    return any(
        part in op
        for part in ("scaled_dot_product", "flash_attn", "_flash_attention", "_efficient_attention")
    )
