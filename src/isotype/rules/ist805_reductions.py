"""A result that needs more digits than 16 bits have

**What it means.** An operator returns log-probabilities over a vocabulary, or cumulative sums over a long axis, in 16 bits. The result then
has only 8 significant bits in bfloat16, or 11 in float16. In other cases, a loop in the code (`total += loss`) adds many 16-bit numbers one
after another, and each addition rounds the sum. An operator may also magnify the rounding of its operand: a square root, a logarithm or a
reciprocal gets `1 - x` of 16-bit numbers near 1, as of a noise schedule `alphas_cumprod`, or `exp` gets a 16-bit parameter.

**Why it is bad.** In bfloat16, a log-probability near -10 is rounded to a multiple of 0.06, so the probability ratios of RL are wrong by up
to 6 %. Distillation losses and perplexities also become less exact. A cumulative sum in 16 bits stops growing: in bfloat16, 256 + 1 is 256.
A loop that adds losses gets the right gradients, but a wrong sum. In bfloat16, the largest number below 1 is 0.996, so the first noise levels
of a diffusion model, `(1 - alphas_cumprod).sqrt()`, are 0 or 0.06 instead of 0.01 to 0.06. State-space models raise `exp(A_log)` to the power
of the distance between two tokens, which multiplies its error.

**An example that costs**

    logprobs = model(ids).logits.log_softmax(-1)             # bfloat16

**Repaired**

    logprobs = model(ids).logits.float().log_softmax(-1)     # in chunks of rows if memory is short

**How safe is the fix?** The fix is safe, because float32 only adds digits. A cast of an operator's input takes the memory of a float32 copy
of this input, such as the logits. A sum in float32 (`total += loss.float()`) takes no additional memory.

**Seen in** huggingface/transformers #31267; huggingface/diffusers #3005, #9004; state-spaces/mamba #923; ml-explore/mlx-lm #1028.
"""

import math

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import grouped, short
from isotype.records.trace import Call, Trace
from isotype.rules.kit.findings import Findings, advice, finding_at, rounding_at
from isotype.rules.kit.weight_sets import spacing
from isotype.rules.kit.words import ANGLES, COUNTS, at, evidence, op_name, place

_REDUCTIONS = ("_log_softmax", "logsumexp", "logcumsumexp", "cumsum", "cumprod")
_LONG = 256
"""If an operator reduces fewer values, such as scores of experts or classes, the lost digits rarely matter."""

_CANCELLED = 0.25  # relative error of the operand of a root, power, logarithm or reciprocal
_NEAR = "a difference of nearly equal numbers, such as 1 - x for x near 1, has few correct digits"

_INACCURATE = 1 / 16
"""The rule reports a sum if its relative error is at least this large. It assumes that each addition is wrong by half a unit in the last place."""


def find(trace: Trace) -> Findings:
    forward = [call for call in trace.calls if call.phase == "forward" and not call.recomputed]
    for calls in grouped(filter(_adds_numbers, forward), lambda call: call.source).values():
        number, low = sum(call.repeats for call in calls), calls[0].results[0][0]
        if number * spacing(1.0, low) / 2 >= _INACCURATE:
            yield finding_at(
                "warning",
                f"a sum of {number:,} numbers is rounded to {dtype_name(low)} after each addition",
                calls,
                cause=f"the sum at {short(calls[0].source) or calls[0].module} is {dtype_name(low)}",
                fixes=(advice(place(calls[0]), "add the numbers in float32"),),
            )
    imprecise = (c for c in forward if c.off >= _CANCELLED and op_name(c) not in ANGLES | COUNTS)
    known = (call for call in imprecise if ":" in call.rounded_at or call.rounded_at in trace.owners)
    for (at_line, _), calls in grouped(known, lambda call: (call.rounded_at, place(call))).items():
        first, (cause, keep) = max(calls, key=lambda call: call.off), rounding_at(trace, at_line, "")
        name, error = dtype_name(first.operands[0].dtype), f"up to {100 * min(first.off, 1):.0f} %"
        message = f"{op_name(first)} gets {name} numbers that are wrong by {error}, because numbers were rounded to 16 bits"
        yield finding_at("warning", message, (first, *calls), cause=cause, notes=(_NEAR,), fixes=(keep,))
    rounded = (call for call in forward if _is_rounded(call) or _is_decay(call, trace))
    for calls in grouped(rounded, place).values():
        first = calls[0]
        dtype, name = dtype_name(first.operands[0].dtype), op_name(first).strip("_")
        of = f"over {_length(first)} values" if name != "exp" else "of a parameter"
        yield finding_at(
            "note" if name == "exp" else "warning",
            f"{name} {of} returns {dtype}",
            calls,
            cause=f"{name} of {dtype} values{at(first.source)}",
            evidence=evidence(first.operands[0].origin),
            fixes=(advice(place(first), f"cast the input of {name} to float32"),),
        )


def _is_decay(call: Call, trace: Trace) -> bool:
    """Return True for `exp(A_log)`: the exponential of a whole 16-bit parameter with several elements."""
    dtype, shape = call.results[0] if op_name(call) == "exp" else (None, ())
    weight = trace.owners.get(call.operands[0].origin.name) if dtype in HALVES else None
    return weight is not None and weight.shape == shape and math.prod(shape) > 1


def _adds_numbers(call: Call) -> bool:
    """Return True if a call adds two 16-bit tensors without dimensions."""
    numbers = len(call.operands) == 2 and not any(operand.shape for operand in call.operands)
    return call.op in ("aten.add.Tensor", "aten.add_.Tensor") and numbers and call.results[0][0] in HALVES


def _is_rounded(call: Call) -> bool:
    low = op_name(call) in _REDUCTIONS and bool(call.operands) and call.operands[0].dtype in HALVES
    return low and _length(call) >= _LONG


def _length(call: Call) -> int:
    """Return how many values the call reduces to one element of its result."""
    shape, (_, result), axis = call.operands[0].shape, call.results[0], dict(call.numbers).get("dim")
    if axis is None:
        return math.prod(shape) // max(math.prod(result), 1)
    return shape[int(axis)] if shape else 1
