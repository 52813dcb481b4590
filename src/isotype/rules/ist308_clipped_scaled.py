"""
**What it means.** Gradients are clipped while they are still multiplied by the loss scale of a GradScaler, or the
optimizer steps with such gradients.

**Why it is bad.** The loss scale begins at 65,536, so nearly every gradient norm exceeds the limit. After unscaling, the
gradient norm of each step is only the limit divided by the scale. Adam divides by the gradients' size and hides most of
the error, but Adam's epsilon is large compared with such gradients. SGD stops learning. No error is raised. An
optimizer step with scaled gradients is up to 65,536 times too large for SGD, and skips no step with infinite gradients.

**An example that costs**

    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)

**Repaired**

    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)                                  # does not unscale a second time

**What is not reported.** `isotype check` does not run the clipping of a script; only `isotype run` reports this finding.
The trainers of transformers, accelerate and Lightning unscale before they clip.

**How safe is the fix?** The fix is safe: the limit then applies to the unscaled gradients, as intended.

**Seen in** milesial/Pytorch-UNet #468; pytorch/examples #1196; Lightning-AI/pytorch-lightning #9599; harubaru/waifu-diffusion #64.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from isotype.core.names import short
from isotype.records.finding import Finding, finding_at
from isotype.records.trace import Trace
from isotype.rules.kit.words import advice

TITLE = "Gradients that are clipped before they are unscaled"

_CLIPS = re.compile(r"aten\.(_foreach_)?(mul|clamp(_min|_max)?)_\.")
"""The in-place operators that `clip_grad_norm_` and `clip_grad_value_` call."""


def find(trace: Trace) -> Iterator[Finding]:
    """Yield a finding if the step clips gradients, or updates parameters with them, before the GradScaler unscales them."""
    if trace.scaled:
        how = "call scaler.step(optimizer) and scaler.update() in place of optimizer.step()"
        yield Finding(
            "IST308",
            "error",
            f"{trace.setup.optimizer} steps with gradients that the loss scale multiplies",
            phase="optimizer",
            cause="optimizer.step() runs without scaler.unscale_(optimizer) and scaler.step(optimizer)",
            fixes=(advice("optimizer.step()", how),),
        )
    unscaled = next((at for at, call in enumerate(trace.calls) if call.phase == "unscale"), 0)
    backward = [call for call in trace.calls[:unscaled] if call.by_script and call.of_gradient]
    measured = next((at for at, call in enumerate(backward) if "norm." in call.op), len(backward))
    clips = [
        call
        for at, call in enumerate(backward)
        if _CLIPS.match(call.op) and (at > measured or "clamp" in call.op)
    ]
    if not clips:
        return
    where = short(clips[0].source) or "the clipping"
    yield finding_at(
        "IST308",
        "warning",
        "gradients are clipped while the loss scale multiplies them",
        clips[0],
        clips,
        cause=f"{where} runs before the gradients are unscaled",
        fixes=(advice(clips[0].source, f"call scaler.unscale_(optimizer) before {where}"),),
    )
