"""
**What it means.** The values of this model were measured, and an operand or result of a float16 operator
exceeds 65504, float16's largest number. The residual stream is the usual place: every block adds to it, and
it grows in models trained in bfloat16. Others are the gated product before `down_proj`, queries and keys, and
gradients.

**Why it is bad.** Larger values become infinite, the next norm or softmax turns them into NaN, and the loss
is NaN from the first step to the last. A GradScaler skips every such step, so nothing is trained.

**An example that fails**

    model = AutoModelForCausalLM.from_pretrained("google/gemma-3-1b-it", dtype=torch.float16)

**Repaired**

    ranges = isotype.measure_ranges("google/gemma-3-1b-it")
    policy = isotype.resolve_precision("google/gemma-3-1b-it", "float16", ranges=ranges)   # a float32 residual stream
    model = isotype.load("google/gemma-3-1b-it", policy)

**How safe is the fix?** Safe: matmuls stay in float16; only values too large for it are carried in float32,
or scaled by a power of two around a matmul, which changes no digit. Hidden states then take twice the memory.
bfloat16 has the range of float32 with fewer digits.

**What was compared.** The measurement, in float32, has the largest magnitude of each operator; the trace has
the operators that run in float16. Magnitudes do not depend on dtypes, so a fix is verified by the same
measurement and a new trace. Fill values of attention masks are left out. Other data have other values: the
report gives the headroom.

**Seen in** huggingface/transformers #36822, #39972, #12225; google/gemma_pytorch #24; unslothai/unsloth
#4005; unslothai/unsloth-zoo #600.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from isotype.core.names import named, plural
from isotype.precision.by_ranges import decide_by_ranges, number
from isotype.precision.facts import ModelFacts
from isotype.precision.ranges import FLOAT16_LARGEST, Ranges
from isotype.records.finding import Finding, Fix, Kind, RangeBoundaries, finding_at
from isotype.records.trace import Trace
from isotype.rules.kit.slow_dtype import step_in
from isotype.rules.kit.value_ranges import Held, growth, held

TITLE = "Measured values beyond float16's range"
KIND: Kind = "values"


def find(trace: Trace) -> Iterator[Finding]:
    """Yield the first operator of the forward, and of the backward, with measured values beyond float16."""
    ranges = trace.setup.ranges
    if ranges is None:
        return
    # A number refused by float16 in a fill (a mask's -1e9) is not a value of the model.
    refused = {abs(value) for call in trace.breaches() for _, value in call.numbers}
    beyond = [each for each in held(trace) if each.value > FLOAT16_LARGEST and each.value not in refused]
    forward = [each for each in beyond if each.call.phase == "forward"]
    if forward:
        yield _finding(trace, ranges, forward)
        return  # infinite values have no gradient
    if beyond:
        yield _finding(trace, ranges, beyond)


def _finding(trace: Trace, ranges: Ranges, beyond: Sequence[Held]) -> Finding:
    first = beyond[0]
    backward = first.call.phase == "backward"
    # A scaler halves the scale until the gradients fit, below 1 if necessary, and skips a step each time.
    skipped = backward and trace.setup.scaler
    end = "takes" if first.takes else "returns"
    what = "gradients" if backward else "values"
    value = number(first.value)
    finding = finding_at(
        "IST809",
        "warning" if skipped else "error",
        f"{_short(first.call.op)} {end} {what} up to {value} in float16: headroom {first.headroom:.2g}",
        first.call,
        places=tuple(dict.fromkeys(each.module for each in beyond)),
        cause=f"{what} of {named(first.module)} reach {value}, and float16 ends at 65,504",
        notes=tuple(_notes(trace, ranges, beyond)),
        fixes=tuple(_fixes(trace, ranges)),
    )
    return replace(finding, module=first.module)  # a folded trace has it under another layer's name


def _short(op: str) -> str:
    name = op.removeprefix("aten.").rpartition(".")[0]
    return "a cast" if name == "_to_copy" else name


def _notes(trace: Trace, ranges: Ranges, beyond: Sequence[Held]) -> Iterator[str]:
    first, *others = beyond
    if others:
        modules = len({each.operator.module for each in others})
        worst = max(beyond, key=lambda each: each.value)
        yield (
            f"{plural(len(others), 'more operator')} in {plural(modules, 'module')}, up to {number(worst.value)} in "
            f"{named(worst.module)}"
        )
    grown = growth(ranges)
    if first.call.phase == "forward" and grown is not None and grown.first:
        begins = f"{number(grown.first_value)} at {grown.first}"
        ends = "" if grown.first == grown.last else f" and {number(grown.largest)} at {grown.last}"
        yield f"the residual stream reaches {begins}{ends}"
    if first.call.phase == "backward" and trace.setup.scaler:
        exponent = math.floor(math.log2(FLOAT16_LARGEST / max(each.value for each in beyond)))
        yield f"the loss scale has to fall to 2^{exponent}, and every halving skips a step"
    yield f"measured {ranges.when[:10]} in {ranges.dtype} on {ranges.text} ({plural(ranges.tokens, 'token')})"


def _fixes(trace: Trace, ranges: Ranges) -> Iterator[Fix]:
    storage = next((w.quantization.format for w in trace.weights if w.quantization is not None), "float16")
    decision = decide_by_ranges(ModelFacts(trace.model), trace.setup.profile, torch.float16, storage, ranges)
    if decision.wide or decision.exceptions:
        exceptions = tuple((each.module, each.how, each.exponent) for each in decision.exceptions)
        wanted = RangeBoundaries("float16", decision.wide, exceptions)
        parts = ["carry the residual stream in float32"] if decision.wide else []
        scaled = [each for each in decision.exceptions if each.how == "scale"]
        float32 = [each for each in decision.exceptions if each.how != "scale"]
        parts += [f"scale {plural(len(scaled), 'matmul')} by powers of two"] if scaled else []
        parts += [f"run {plural(len(float32), 'module')} in float32"] if float32 else []
        yield Fix(
            f"{', '.join(parts)}; matmuls stay in float16",
            "safe",
            actions=(wanted.action(),),
        )
    native = trace.setup.profile.native
    for dtype in (torch.bfloat16, torch.float32):
        if dtype in native:
            yield step_in(trace, torch.float16, dtype)
