"""Code that IST601, IST602 and IST606 share: matmuls in a dtype that the device runs slowly or not at all."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import named, starred
from isotype.records.finding import Action, Cost, Finding, Fix, Safety, Severity
from isotype.records.trace import Call, Trace, Weight
from isotype.rules.kit import costs
from isotype.rules.kit.findings import actions, advice, finding_at
from isotype.rules.kit.weight_sets import modules, quantized
from isotype.rules.kit.words import cause_text

_LEAST_SHARE = 0.01
_LEAST_SLOWER = 1.5


def find(trace: Trace, dtype: torch.dtype, other: torch.dtype) -> Iterator[Finding]:
    """Yield findings for matmuls in `dtype` that the device runs slowly or not at all.

    The fixes run them in `other` or in float32. For a 16-bit dtype, `other` is the other 16-bit dtype.
    """
    profile = trace.setup.profile
    support = profile.supports(dtype)
    calls = [call for call in trace.calls if call.run_dtype == dtype]
    # For a step without a traced matmul, the intended dtype counts.
    meant = not any(trace.flops.values()) and trace.setup.compute == dtype
    targets = _targets(trace, dtype, other)
    if (support == "native" and not targets) or not (meant or _time_share(trace, dtype) >= _LEAST_SHARE):
        return
    share = costs.flops_share(trace, calls)
    cost = Cost(share, slowdown=_slowdown(trace, calls, dtype, (targets or [torch.float32])[0]))
    how = "do not run" if support == "refused" else "have no hardware support"
    if support == "native" or dtype in profile.rates:
        how = f"run {profile.slower(dtype, other):.2g} times slower than {dtype_name(other)}"
    message = f"{dtype_name(dtype)} matmuls {how} on {profile.title}"
    severity: Severity = "error" if support == "refused" else "warning"
    cause, ways = _cause(trace, dtype, calls), fixes(trace, dtype, other)
    # Muon computes in bfloat16 with all settings of the step.
    if calls and all(call.phase == "optimizer" for call in calls):
        cause = f"the step of {trace.setup.optimizer} computes in {dtype_name(dtype)}"
        how = f"choose an optimizer without matmuls in {dtype_name(dtype)}, such as AdamW"
        ways = (advice("optimizer", how),)
    notes = (profile.reason(dtype), *_measured(trace, dtype), *_estimate(cost, trace, dtype))
    facts: dict[str, Any] = {"cause": cause, "notes": notes, "fixes": ways, "cost": cost}
    if calls:
        yield finding_at(severity, f"{message}: {100 * share:.0f} % of the FLOPs", calls, **facts)
    else:
        yield Finding(severity, message, **facts)


def _measured(trace: Trace, dtype: torch.dtype) -> Iterator[str]:
    profile = trace.setup.profile
    for other in sorted(profile.native & profile.speed.keys(), key=dtype_name):
        slower = profile.slower(dtype, other)
        if slower is not None and slower >= _LEAST_SLOWER:
            yield f"measured: {dtype_name(dtype)} matmuls run {slower:.2g} times slower than {dtype_name(other)}'s"


def _time_share(trace: Trace, dtype: torch.dtype) -> float:
    """Return the share (0 to 1) of all matmuls' time that matmuls in `dtype` take; of the FLOPs if no rate is known."""
    rates = trace.setup.profile.speed or trace.setup.profile.rates
    unknown = rates.get(torch.float32, 1.0)
    times = {run_in: flops / rates.get(run_in, unknown) for run_in, flops in trace.flops.items()}
    return times.get(dtype, 0.0) / (sum(times.values()) or 1.0)


def _slowdown(trace: Trace, calls: Sequence[Call], dtype: torch.dtype, target: torch.dtype) -> float | None:
    """Return an estimate of how many times faster the step is if its matmuls in `dtype` run in `target`."""
    slower = trace.setup.profile.slower(dtype, target)
    if slower is not None and trace.setup.profile.speed:
        share = _time_share(trace, dtype)
        return 1 / (1 - share + share / slower) if calls else None
    # An emulated dtype is converted to float32. So at best, it has the rate of float32.
    return costs.slowdown(trace, calls, target, stand_in=torch.float32)


def fixes(trace: Trace, dtype: torch.dtype, other: torch.dtype) -> tuple[Fix, ...]:
    """Return fixes that run the whole step in `other` or in float32, if the device runs that dtype natively and faster."""
    targets = dict.fromkeys(_targets(trace, dtype, other))
    if _gathered(trace, dtype):
        return tuple(_gather_in(target) for target in targets)
    return tuple(step_in(trace, dtype, target) for target in targets)


def _gather_in(target: torch.dtype) -> Fix:
    scaled = ", and scale the loss by a GradScaler" if target == torch.float16 else ""
    return advice("param_dtype", f"pass MixedPrecisionPolicy(param_dtype={target}){scaled}")


def _gathered(trace: Trace, dtype: torch.dtype) -> bool:
    """Return True if FSDP2 casts weights to `dtype` when it gathers them."""
    return any(dtype == weight.gathered != weight.dtype for weight in trace.weights)


def _targets(trace: Trace, dtype: torch.dtype, other: torch.dtype) -> list[torch.dtype]:
    profile = trace.setup.profile
    native = [target for target in (other, torch.float32) if profile.supports(target) == "native"]
    if profile.supports(dtype) != "native" and dtype not in profile.rates:
        return native
    return [target for target in native if (profile.slower(dtype, target) or 1.0) >= _LEAST_SLOWER]


def _estimate(cost: Cost, trace: Trace, dtype: torch.dtype) -> Iterable[str]:
    if cost.slowdown is None or cost.slowdown < 1.005:
        return ()
    if trace.setup.profile.speed:
        return (f"about {cost.slowdown:.2g} times the step time, by the measured rates of matmuls alone",)
    if dtype in trace.setup.profile.rates:
        return costs.estimate(cost, trace)
    return (
        "the slowdown is estimated with the float32 rate for these matmuls (roofline model), and may be larger",
    )


def _cause(trace: Trace, dtype: torch.dtype, calls: Sequence[Call]) -> str:
    name, setup = dtype_name(dtype), trace.setup
    if setup.autocast == dtype:
        return f"autocast is set to {name}"
    computing = next((weight for weight, state in quantized(trace) if state.compute == dtype), None)
    if computing is not None:
        return f"the quantized layer {named(computing.module)} computes in {name}{computing.by_line}"
    if _gathered(trace, dtype):
        return f"FSDP2 gathers the weights in {name}, by MixedPrecisionPolicy(param_dtype=torch.{name})"
    plain = {weight.name: weight for weight in _plain(trace, dtype)}
    causes = [
        (call, o.origin.cause) for call in calls for o in call.floats if o.dtype == dtype and len(o.shape) > 1
    ]
    weights = [(call.module, plain[cause.name]) for call, cause in causes if cause.name in plain]
    if weights:
        inside = (weight for module, weight in weights if weight.module == module)
        return next(inside, weights[0][1]).dtype_text
    cast = next((cause for _, cause in causes if cause.kind == "cast" and cause.source), None)
    if cast is not None:
        return cause_text(cast)
    return next((weight.dtype_text for weight in plain.values()), f"the step computes in {name}")


def _plain(trace: Trace, dtype: torch.dtype) -> list[Weight]:
    """Return the parameters in `dtype` that are not quantized."""
    return [w for w in trace.weights if w.dtype == dtype and not w.buffer and w.quantization is None]


_UNSAFE = {
    torch.float16: "float16 overflows above 65,504",
    torch.bfloat16: "bfloat16 keeps only 8 bits",
    torch.float32: "float32 keeps 7 of float64's 15 digits",
}
"""For each dtype: the drawback of casting weights to it."""


def step_in(trace: Trace, dtype: torch.dtype, target: torch.dtype) -> Fix:
    """Return a fix that runs the step in `target` by changing settings, weights and quantized layers."""
    name, scaler, profile = dtype_name(target), target == torch.float16, trace.setup.profile
    plain = _plain(trace, dtype)
    computing = modules(weight for weight, state in quantized(trace) if state.compute == dtype)
    stale = modules(weight for weight, state in quantized(trace) if state.state == dtype)
    # An input of the model stays in `dtype` if only weights are cast.
    operands = (operand for call in trace.calls for operand in call.operands)
    inputs = any(operand.dtype == dtype and operand.origin.kind == "input" for operand in operands)
    changes = (
        Action("setting", "autocast", "None" if target == torch.float32 else name),
        Action("setting", "scaler", str(scaler)),
        Action("setting", "compute", name),
        # Trained parameters become float32 masters, because a GradScaler accepts no float16 gradients.
        *(Action("parameter", starred(w.name), "float32" if w.trainable else name) for w in plain),
        *actions("compute", computing, name),
        *actions("state", stale, name),
        *actions("input", [""] if inputs else [], name),
    )
    wider = target.itemsize > dtype.itemsize
    lossless = wider or (target in HALVES and all(weight.trainable for weight in plain))
    settings = f"run the step in {name}{' with a GradScaler' if scaler else ''}"
    orders = ["cast the weights"] if plain else []
    orders += [f"set the compute dtype of the quantized layers to {name}"] if computing else []
    if not orders or (trace.setup.autocast, trace.setup.scaler) != (target, scaler):
        orders.insert(0, settings)
    why = "" if lossless else f"; {_UNSAFE[target]}"
    emulated, best = profile.supports(dtype) == "emulated", profile.best_dtype()
    if emulated and target == torch.float32 != best and profile.slower(dtype, target) is None:
        why = f": float32 is as fast as emulated {dtype_name(dtype)} or faster, but slower than {dtype_name(best)}"
    safety: Safety = "safe" if lossless else "unsafe"
    return Fix(f"{' and '.join(orders)}{why}", safety, actions=tuple(dict.fromkeys(changes)))
