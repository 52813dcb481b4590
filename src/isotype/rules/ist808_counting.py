"""Integers too large for a 16-bit dtype

**What it means.** `torch.arange` returns a 16-bit result, a cast rounds the result of `torch.arange` or an integer input (positions,
timesteps) to 16 bits, or an optimizer counts steps in a 16-bit tensor. bfloat16 represents every integer up to 256, and float16 every
integer up to 2048. Above these limits, some integers become equal to their neighbours.

**Why it is bad.** Positions, distances and bins that should differ are the same: from 512 on, bfloat16 represents only every fourth
position. No error is raised, and tests with short sequences are not affected. A step count in bfloat16 stops at 256. Adam's bias correction
then stops too, and every later update is too small.

**An example that costs**

    positions = torch.arange(hidden.shape[1], dtype=hidden.dtype)      # bfloat16: 255, 256, 256, 258, 260, 260, …

**Repaired**

    positions = torch.arange(hidden.shape[1])                          # integers, or dtype=torch.float32

**How safe is the fix?** The fix is safe: positions and step counts are exact as integers, and as float32 numbers up to 16 million.

**Seen in** EleutherAI/gpt-neox #1003; pytorch/ao #4915; vllm-project/speculators #411, #899.
"""

import math

from isotype.core.dtypes import EXACT_INTEGERS, FLOATS, dtype_name
from isotype.core.names import grouped, short
from isotype.records.trace import Call, Operand, Trace
from isotype.rules.kit.findings import Findings, advice, finding_at, fix
from isotype.rules.kit.words import ANGLES, COUNTS, cause_text, op_name


def find(trace: Trace) -> Findings:
    yield from _counters(trace)
    # IST803 reports sines and cosines.
    angles = {call.rounded_at for call in trace.calls if call.off and op_name(call) in ANGLES}
    wrong = (call for call in trace.calls if _rounds(call) and call.source not in angles)
    for (source, dtype), calls in grouped(wrong, lambda call: (call.source, call.results[0][0])).items():
        name, operands = dtype_name(dtype), calls[0].operands
        by = f"a cast of {operands[0].origin.name} to" if operands else "torch.arange in"
        yield finding_at(
            "warning",
            f"integers are rounded to {name}: they are wrong by up to {calls[0].off:g}",
            calls,
            cause=f"{by} {name} at {short(source)}",
            notes=(f"{name} represents every integer up to {EXACT_INTEGERS[dtype]:,}",),
            fixes=(
                fix(f"count in float32 at {short(source)}", "line", (source,), "float32"),
                advice(source, f"count in integers, and cast the results to {name}"),
            ),
        )


def _counters(trace: Trace) -> Findings:
    """Yield a finding for each line where an optimizer creates a 16-bit step count."""
    counters = filter(_is_counter, trace.calls)
    for source, calls in grouped(counters, lambda call: call.operands[0].origin.cause.source).items():
        cause = calls[0].operands[0].origin.cause
        name, last = dtype_name(cause.dtype), f"{EXACT_INTEGERS[cause.dtype]:,}"
        in_float32 = fix(f"count in float32 at {short(source)}", "line", (source,), "float32")
        in_python = advice("step", "count in a Python number, or in a float32 tensor")
        message = f"a count in {name} stops at {last}"
        notes = (f"in {name}, {last} + 1 is {last}",)
        fixes = (in_float32, in_python) if source else (in_python,)
        yield finding_at("warning", message, calls, cause=cause_text(cause), notes=notes, fixes=fixes)


def _is_counter(call: Call) -> bool:
    """Return True if a call is an optimizer's count of steps: it adds a number to 16-bit tensors of one element."""
    foreach = call.op.startswith("aten._foreach_add_.")  # adds one tensor to the counts of all parameters
    if call.phase != "optimizer" or not (foreach or call.op.startswith("aten.add_.")):
        return False
    first = call.operands[0]
    counter = first.dtype in EXACT_INTEGERS and all(math.prod(o.shape) == 1 for o in call.operands)
    one = call.numbers == (("alpha", 1.0),) if foreach else not call.numbers and len(call.operands) == 1
    return counter and one and first.origin.cause.kind in ("constant", "data", "outside")


def _rounds(call: Call) -> bool:
    """Return True if an `arange`, or a cast of its result or of an integer input, returns wrong integers."""
    counts = op_name(call) in COUNTS and all(map(_is_count, call.operands))
    return counts and call.off >= 1 and call.phase in ("forward", "generate") and not call.recomputed


def _is_count(operand: Operand) -> bool:
    integers = operand.origin.kind == "input" and operand.dtype not in FLOATS
    return integers or operand.origin.path()[-1].name == "arange"
