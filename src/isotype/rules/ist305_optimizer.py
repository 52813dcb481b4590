"""Mixed dtypes in the optimizer's step

**What it means.** An optimizer step mixes dtypes. Either a kernel gets a parameter, its gradient and its moments in different dtypes, or
some trainable parameters are float32 and other trainable parameters are 16-bit. Or `load_state_dict` of the optimizer has cast its states
to another dtype (only in `isotype run`).

**Why it is bad.** In the first case, a fused kernel raises an error. In the second, the 16-bit parameters lose small updates. In the third,
float32 states of 16-bit parameters lose digits, and the resumed training differs. In float16, small values of Adam's second moment become
zero.

**An example that fails**

    parameter.grad_dtype = torch.bfloat16                   # float32 parameters with bfloat16 gradients
    torch.optim.AdamW(model.parameters(), fused=True).step()

**Repaired**

    torch.optim.AdamW(model.parameters())                   # or gradients in the parameters' dtype

**How safe is the fix?** The fix is safe: an AdamW that is not fused computes the same update. Casts of gradients or parameters to float32
keep every value. If the moments have another dtype, create the optimizer after the last cast of the model. After a load, assign the states
again: `optimizer.state[parameter]["exp_avg"] = saved["state"][index]["exp_avg"]`.

**Seen in** pytorch/pytorch #110758; NVIDIA/TransformerEngine #3358; deepspeedai/DeepSpeed #7746; HomebrewML/HeavyBall #26;
pytorch/pytorch #43706; facebookresearch/fairscale #50; pytorch/torchtitan #4615.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from isotype.compat.wrappers import FSDP1
from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import grouped, listed, plural, short, starred
from isotype.core.optimizers import OPTIMIZERS
from isotype.records.finding import Action, Finding, Fix
from isotype.records.trace import GRADIENTLESS, Call, Operand, Trace
from isotype.rules.kit.findings import Findings, Fixes, advice, finding_of, setting
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.weight_sets import count, counted, float32_masters, trained
from isotype.rules.kit.words import at, cause_text, device_error, evidence

CLAIMS = (Claim("step", lambda broken: broken.call.phase == "optimizer"),)


def find(trace: Trace) -> Findings:
    for (before, after, line), casts in grouped(
        trace.state_casts, lambda cast: (*cast[1:3], cast[4])
    ).items():
        yield _loaded([name for name, *_ in casts], max(count for *_, count, _ in casts), before, after, line)
    broken = [call for call in trace.breaches() if call.phase == "optimizer" and call.op not in GRADIENTLESS]
    if broken:
        yield _refused(trace, broken)
        return
    low = trained(trace, *HALVES)
    high = [weight for weight in trained(trace, torch.float32) if not weight.pinned]
    # IST502 reports adapters of several dtypes; IST301 and IST302 report 16-bit parameters with a GradScaler.
    if all(weight.adapter for weight in (*low, *high)) or trace.setup.scaler:
        return
    if low and high and "optimizer" in trace.setup.phases:
        dtypes = Counter(dtype_name(weight.dtype) for weight in low)
        yield finding_of(
            "warning",
            f"{counted(low, 'trainable parameter', 'are')} {' or '.join(sorted(dtypes))}, {count(high)} float32",
            low,
            phase="optimizer",
            fixes=float32_masters(trace, low)[:1],
        )


def _loaded(
    states: Sequence[str], number: int, before: torch.dtype, after: torch.dtype, line: str
) -> Finding:
    """Return the finding for states of an optimizer that `load_state_dict` has cast from the dtype `before` to `after`."""
    names, dtypes = listed(states), f"from {dtype_name(before)} to {dtype_name(after)}"
    effect = "their digits are lost" if after.itemsize < before.itemsize else "they take more memory"
    limits = torch.finfo(after)
    zeros = f"values below {limits.tiny * limits.eps / 2:.0e} become zero"
    return Finding(
        "warning",
        f"load_state_dict has cast {names} of {plural(number, 'parameter')} {dtypes}: {effect}",
        source=line,
        phase="optimizer",
        cause=f"Optimizer.load_state_dict casts the loaded states to their parameter's dtype{at(line)}",
        notes=(zeros,) if after == torch.float16 else (),
        fixes=(advice("state", "after load_state_dict, assign these states again from the loaded dict"),),
    )


def _refused(trace: Trace, broken: list[Call]) -> Finding:
    first = broken[0]
    mismatched = _mismatched(first)
    floats = first.floats
    dtypes = sorted({dtype_name(operand.dtype) for operand in floats})
    origin, dtype = mismatched.origin, dtype_name(mismatched.dtype)
    cause = cause_text(origin.cause, trace.owners)
    if origin.kind == "outside":
        cause = f"{origin.name} is {dtype}"
    elif origin.kind == "gradient":
        cause = f"the gradient of {_parameter(first, mismatched, trace) or origin.name} is {dtype}"
    operands = tuple(operand for operand in floats if _entry(operand) == _entry(mismatched))
    fault = f"mixes {' and '.join(dtypes)}" if len(dtypes) > 1 else f"has no kernel for {dtypes[0]}"
    return Finding(
        "error",
        f"{first.op} {fault}",
        op=first.op,
        phase="optimizer",
        source=first.source,
        cause=cause,
        notes=device_error(first.refusal),
        operands=operands,
        fixes=tuple(_fixes(trace, broken, mismatched)),
        evidence=tuple(dict.fromkeys(line for operand in operands for line in evidence(operand.origin))),
    )


def _entry(operand: Operand) -> str:
    """Return the index in `operand.role`, such as `[3]` in `grads[3]`. A parameter and its gradient have the same index."""
    return "".join(operand.role.partition("[")[1:])


def _mismatched(call: Call) -> Operand:
    """Return the operand with the wrong dtype: an optimizer state, or else a gradient, or else a parameter."""
    floats = call.floats
    updated: dict[str, torch.dtype] = {}
    for operand in floats:
        updated.setdefault(_entry(operand), operand.dtype)
    other = [operand for operand in floats if operand.shape and operand.dtype != updated[_entry(operand)]]
    entries = {_entry(operand) for operand in other}
    state = [o for o in floats if o.origin.kind == "outside" and _entry(o) in entries]
    gradients = [operand for operand in other or floats if operand.origin.kind == "gradient"]
    return (state or gradients or other or list(call.operands))[0]


def _parameter(call: Call, operand: Operand, trace: Trace) -> str:
    """Return the name of the parameter whose gradient is `operand`; "" if `operand` is no gradient."""
    if operand.origin.kind != "gradient":
        return ""
    neighbours = (other.origin for other in call.operands if _entry(other) == _entry(operand))
    origins = [*(origin for origin in neighbours if origin.kind == "parameter"), *operand.origin.path()]
    return next((o.name for o in origins if o.kind == "parameter" or o.name in trace.owners), "")


def _fixes(trace: Trace, broken: Sequence[Call], mismatched: Operand) -> Fixes:
    call = broken[0]
    named = ((operand, _parameter(call, operand, trace)) for operand in call.operands)
    owned = ((operand, name, trace.owners[name].dtype) for operand, name in named if name in trace.owners)
    unlike = {name: dtype for operand, name, dtype in owned if operand.dtype != dtype}
    if any(FSDP1 in name for name in unlike):
        yield advice("fsdp", "leave keep_low_precision_grads=False in FSDP's MixedPrecision")
    elif unlike:
        changes = (Action("gradient", starred(name), dtype_name(dtype)) for name, dtype in unlike.items())
        text = "accumulate each gradient in the dtype of its parameter"
        yield Fix(text, "safe", actions=tuple(dict.fromkeys(changes)))
    if mismatched.origin.kind == "outside":
        how = "create the optimizer after the last cast of the model, or load the optimizer's state again"
        yield advice("optimizer", how)
    optimizer = trace.setup.optimizer
    kinds = {kind for kind, _ in trace.setup.updates.values()} or {optimizer}
    by_torch = all(kind in OPTIMIZERS or hasattr(torch.optim, kind) for kind in kinds)
    one_line = len({other.source for other in trace.calls if other.phase == call.phase}) == 1
    if "fused " in optimizer:
        yield advice("optimizer", "create the optimizer with fused=False")
    elif "fused" in optimizer:
        yield setting("use an optimizer that is not fused", "optimizer", "adamw")
    # All operators of torch's own optimizers have the script's line of step(), where no cast can be added.
    elif call.source and not (by_torch and one_line):
        lines = {other.source: other for other in reversed(broken) if other.source}
        alone = len({operand.dtype for operand in call.floats}) == 1
        casts = []
        for line, other in reversed(lines.items()):
            mixed = len({operand.dtype for operand in other.floats}) > 1
            casts.append(Action("line", line, dtype_name(other.operands[0].dtype) if mixed else "float32"))
        why = "and the result back" if alone else "the dtype of the updated tensor"
        dtypes = " and ".join(f"at {short(c.target)} to {c.value}" for c in casts)
        yield Fix(f"cast the operands {dtypes}, {why}", "safe", actions=tuple(casts))
