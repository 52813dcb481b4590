"""Gradients too small for float16 at the first loss scale

**What it means.** A GradScaler multiplies the gradients by 65536 at first. More than half of the measured gradients are below 3e-8 even
after this multiplication (`isotype.measure_ranges` measures them). float16 rounds them to zero, because its smallest number is 6e-8.

**Why it is bad.** A parameter whose gradient is rounded to zero does not change. A GradScaler doubles its scale only once in 2000 steps
without an overflow. Most of a short training is over by then.

**An example that costs**

    scaler = torch.amp.GradScaler()             # the loss is a mean over very many values, so gradients are small

**Repaired**

    ranges = isotype.measure_ranges(model, batch)
    policy = isotype.resolve_precision(model, "float16", ranges=ranges)
    scaler = torch.amp.GradScaler(init_scale=policy.loss_scale)    # the largest gradient is then at most 4094

**How safe is the fix?** The fix is safe: the scaler multiplies the loss by a power of two and divides the gradients by the same number. If
the scale is too large, the scaler skips one step and halves the scale.

**Seen in** Mixed Precision Training (https://arxiv.org/abs/1710.03740), section 3.2: the training of detection networks diverged because
most of their gradients were too small for float16.
"""

import math

from isotype.precision.ranges import first_loss_scale
from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice
from isotype.rules.kit.value_ranges import flushed

KIND = "values"

_FIRST_SCALE = 2.0**16
_MOST = 0.5


def find(trace: Trace) -> Findings:
    setup = trace.setup
    undefined = setup.ranges is not None and setup.ranges.undefined is not None
    shares = flushed(trace) if setup.scaler and not undefined else None
    if shares is None or shares.scaled <= _MOST:
        return
    if setup.policy is not None and setup.policy.loss_scale > _FIRST_SCALE:
        return  # the policy has chosen its loss scale by this measurement
    exponent = round(math.log2(first_loss_scale(shares.gradient)))
    scaler = f"torch.amp.GradScaler(init_scale=2.0**{exponent})"
    yield Finding(
        "warning",
        f"{100 * shares.scaled:.0f} % of the gradients' values become zero in float16 at a loss scale of 65536",
        phase="backward",
        cause=f"the largest measured gradient is {shares.gradient:.2g}",
        notes=(f"without loss scaling, {100 * shares.plain:.0f} % become zero",),
        fixes=(advice("init_scale", f"begin with a larger loss scale: {scaler}"),),
    )
