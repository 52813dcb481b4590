"""Measured values beyond float16's range

**What it means.** `isotype.measure_ranges` measured the values of this model in a float32 step. An operand or result of a float16 operator
exceeds 65504, the largest number of float16. In other cases, the loss or a gradient is infinite or NaN even in float32, because of
`sqrt(0)`, `0 / 0`, or `log(softmax(x))` of large scores. Values above 65504 are most frequent in the residual stream of models that were
trained in bfloat16. The residual stream is the tensor of hidden states to which every block adds its result. Other frequent places are the
gated product before `down_proj`, the queries, the keys and the gradients.

**Why it is bad.** Values above 65504 become infinite in float16, the next norm or softmax turns them into NaN, and the loss is NaN in every
step. A GradScaler skips every such step, so nothing is trained.

**An example that fails**

    model = AutoModelForCausalLM.from_pretrained("google/gemma-3-1b-it", dtype=torch.float16)

**Repaired**

    ranges = isotype.measure_ranges("google/gemma-3-1b-it")
    policy = isotype.resolve_precision("google/gemma-3-1b-it", "float16", ranges=ranges)   # a float32 residual stream
    model = isotype.load("google/gemma-3-1b-it", policy)

**How safe is the fix?** The fix is safe: matmuls stay in float16. The fix computes the residual stream, or a module with large values, in
float32, which takes twice the memory. For some matmuls, the fix divides the input by a power of two and multiplies the result by the same
number, which changes no digit. A step in float32, a smaller fill value of a mask, and an epsilon in `sqrt` are also safe. A cast of frozen
float16 weights to bfloat16 is unsafe, because bfloat16 has three bits less.

**What was compared.** The rule compares each operator that runs in float16 with the largest magnitude that was measured for it. Other data
can have larger values, so the report gives the headroom: 65504 divided by this magnitude.

**Seen in** huggingface/transformers #36822, #39972, #12225; google/gemma_pytorch #24; unslothai/unsloth #4005; unslothai/unsloth-zoo #600;
NVIDIA/apex #379.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from isotype.core.names import named, plural, short
from isotype.precision.by_ranges import decide_by_ranges, number
from isotype.precision.facts import ModelFacts
from isotype.precision.ranges import FLOAT16_LARGEST, OperatorRange, Ranges
from isotype.records.finding import Finding, Fix, RangeBoundaries
from isotype.records.trace import Call, Trace
from isotype.rules.kit.findings import Findings, Fixes, advice, finding_at
from isotype.rules.kit.slow_dtype import step_in
from isotype.rules.kit.value_ranges import Float16Value, float16_values

KIND = "values"

_GUARDS = "call log_softmax or logsigmoid in place of the two functions, or add an epsilon to a divisor or to the argument of sqrt or log"


def find(trace: Trace) -> Findings:
    ranges = trace.setup.ranges
    if ranges is None:
        return
    if ranges.undefined is not None:
        if not any(call.undefined for call in trace.calls):  # IST814 reports these calls
            yield _undefined(ranges, ranges.undefined)
        return
    # A number that float16 refuses (a mask's -1e9) is no value of the model.
    refused, written = _numbers(trace.breaches()), _numbers(trace.calls)
    beyond = [
        value
        for value in float16_values(trace)
        if value.value > FLOAT16_LARGEST and value.value not in refused
    ]
    of_model = [value for value in beyond if value.value not in written]
    forward = [value for value in of_model if value.call.phase == "forward"]
    if of_model:
        yield _finding(trace, ranges, forward or of_model)  # infinite values in the forward have no gradient
    elif beyond:
        yield _mask(beyond)


def _numbers(calls: Iterable[Call]) -> set[float]:
    """Return the absolute values of the Python numbers in the arguments of `calls`, rounded to float32."""
    return {abs(torch.tensor(value).item()) for call in calls for _, value in call.numbers}


def _mask(beyond: Sequence[Float16Value]) -> Finding:
    """Return the finding for a number in the code that becomes infinite in float16, as in `(1 - mask) * -1e9`."""
    first = beyond[0]
    value, where = number(first.value), short(first.call.source)
    return finding_at(
        "warning",
        f"the number {value} becomes infinite in float16: a completely masked row becomes NaN",
        [first.call],
        places=tuple(dict.fromkeys(value.module for value in beyond)),
        cause=f"{_short(first.call.op)} by {value} at {where}",
        fixes=(advice(first.call.source, f"write torch.finfo(dtype).min instead of the number at {where}"),),
    )


def _undefined(ranges: Ranges, operator: OperatorRange) -> Finding:
    """Return the finding for a step whose loss or gradients are infinite or NaN even in float32."""
    what = "gradients" if all(map(math.isfinite, ranges.loss)) else "loss and gradients"
    where = short(operator.source) or named(operator.module)
    returns = "NaN" if math.isnan(operator.output) else "infinity"
    how = f"keep zeros and large numbers out of {where}: {_GUARDS}"
    return Finding(
        "error",
        f"the {what} of this batch are not finite, even in {ranges.dtype}: {_short(operator.op)} returns {returns}",
        module=operator.module,
        op=operator.op,
        phase=operator.phase,
        source=operator.source,
        cause=f"{operator.op} of finite operands, in the {operator.phase} of {where}",
        notes=(_measured(ranges),),
        fixes=(advice(operator.source or operator.module, how),),
    )


def _finding(trace: Trace, ranges: Ranges, beyond: Sequence[Float16Value]) -> Finding:
    first = beyond[0]
    backward = first.call.phase == "backward"
    # A GradScaler halves the scale until the gradients fit, even below 1. It skips a step each time.
    skipped = backward and trace.setup.scaler
    end = "takes" if first.takes else "returns"
    what = "gradients" if backward else "values"
    value = number(first.value)
    return finding_at(
        "warning" if skipped else "error",
        f"{_short(first.call.op)} {end} {what} up to {value} in float16: headroom {first.headroom:.2g}",
        [first.call],
        module=first.module,  # in a folded trace the call has another layer's name
        places=tuple(dict.fromkeys(value.module for value in beyond)),
        cause=f"{what} of {named(first.module)} reach {value}, but float16's largest number is 65,504",
        notes=tuple(_notes(trace, ranges, beyond)),
        fixes=tuple(_fixes(trace, ranges)),
    )


def _short(op: str) -> str:
    name = op.removeprefix("aten.").rpartition(".")[0]
    return "a cast" if name == "_to_copy" else name


def _notes(trace: Trace, ranges: Ranges, beyond: Sequence[Float16Value]) -> Iterator[str]:
    first, *others = beyond
    if others:
        modules = len({value.operator.module for value in others})
        worst = max(beyond, key=lambda value: value.value)
        places = f"{plural(len(others), 'more operator')} in {plural(modules, 'module')}"
        yield f"{places}, up to {number(worst.value)} in {named(worst.module)}"
    large = next((module for module in ranges.stream_modules if module.output > FLOAT16_LARGEST), None)
    largest = ranges.residual
    if first.call.phase == "forward" and large is not None and largest is not None:
        ends = "" if large.name == largest.name else f" and {number(largest.output)} at {largest.name}"
        yield f"the residual stream reaches {number(large.output)} at {large.name}{ends}"
    if first.call.phase == "backward" and trace.setup.scaler:
        exponent = math.floor(math.log2(FLOAT16_LARGEST / max(value.value for value in beyond)))
        yield f"the loss scale has to fall to 2^{exponent}, and each halving costs a skipped step"
    yield _measured(ranges)


def _measured(ranges: Ranges) -> str:
    return f"{ranges.measured} ({plural(ranges.tokens, 'token')})"


def _fixes(trace: Trace, ranges: Ranges) -> Fixes:
    storage = next((w.quantization.format for w in trace.weights if w.quantization is not None), "float16")
    decision = decide_by_ranges(ModelFacts(trace.model), trace.setup.profile, torch.float16, storage, ranges)
    if decision.wide or decision.exceptions:
        exceptions = tuple((layer.module, layer.how, layer.exponent) for layer in decision.exceptions)
        wanted = RangeBoundaries("float16", decision.wide, exceptions)
        parts = ["keep the residual stream in float32"] if decision.wide else []
        scaled = sum(layer.how == "scale" for layer in decision.exceptions)
        float32 = len(exceptions) - scaled
        parts += [f"scale {plural(scaled, 'matmul')} by powers of two"] if scaled else []
        parts += [f"run {plural(float32, 'module')} in float32"] if float32 else []
        yield Fix(f"{', '.join(parts)}; matmuls stay in float16", "safe", actions=(wanted.action(),))
    for dtype in (torch.bfloat16, torch.float32):
        if dtype in trace.setup.profile.native:
            yield step_in(trace, torch.float16, dtype)
