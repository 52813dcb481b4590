"""Calls of a GradScaler or an optimizer in the wrong order

**What it means.** The calls of a GradScaler have the wrong order, or one of them is missing:

1. Gradients are clipped while they are still multiplied by the loss scale.
2. The optimizer steps with gradients that are still multiplied by the loss scale.
3. Gradients are divided by the loss scale, but the loss was not multiplied by it.
4. An optimizer steps twice with the gradients of one backward: `scaler.step(optimizer)` and then `optimizer.step()`.
5. The GradScaler raises an error, because `scale()` or `update()` was not called, or `unscale_()` was called twice.

**Why it is bad.** Only case 5 raises an error. The loss scale begins at 65,536.

1. Nearly every scaled norm exceeds the limit. Clipping reduces the norm to the limit, and unscaling then divides it by
   the scale. SGD stops learning. Adam's updates become smaller, because its epsilon exceeds such gradients.
2. A step of SGD is up to 65,536 times too large, and a step with infinite gradients is not skipped.
3. A step of SGD is 65,536 times too small.
4. The update doubles. If `scaler.step()` skips infinite gradients, the second step makes weights NaN.

**An example that costs**

    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)

**Repaired**

    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)                                  # does not unscale a second time

**What is not reported.** `isotype check` does not run a script's clipping and steps; only `isotype run` reports these
cases. The trainers of transformers and Lightning's automatic optimization unscale before they clip.

**How safe is the fix?** Safe: you correct the calls. Each step then uses every gradient once, after it was divided by
the loss scale.

**Seen in** milesial/Pytorch-UNet #468; pytorch/examples #1196; Lightning-AI/pytorch-lightning #9599, #18089, #19695; harubaru/waifu-diffusion #64;
nerfstudio-project/nerfacc #307; starrytong/SCNet #7; microsoft/Swin-Transformer #311; Azure/MS-AMP #45; Haian-Jin/LVSM #19.
"""

import re
from functools import partial

from isotype.core.names import short
from isotype.records.finding import Finding, in_library
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_at

_CLIPS = re.compile(r"aten\.(_foreach_)?(mul|clamp(_min|_max)?)_\.")
"""The in-place operators that `clip_grad_norm_` and `clip_grad_value_` call."""

_SCALE = "call scaler.scale(loss).backward() in place of loss.backward(); with accelerate, accelerator.backward(loss); with Lightning, self.manual_backward(loss)"
_UPDATE = "call scaler.update() once after the last scaler.step(), and also if the code does not call scaler.step(); after several micro-batches, call unscale_() only once; Lightning calls unscale_() in optimizer.step()"
_TWICE = "leave out one of the two steps, or compute new gradients before the second"
_TWICE_SCALED = "leave out optimizer.step(): scaler.step(optimizer) calls optimizer.step(), except if a gradient is infinite or NaN"
REFUSALS = {
    "_scale is None": ("no loss was multiplied by the loss scale", _SCALE),
    "has already been called": ("scaler.update() did not run after the earlier call", _UPDATE),
    "is being called after step()": (
        "scaler.step() has already unscaled these gradients",
        "call scaler.unscale_(optimizer) before scaler.step(optimizer)",
    ),
    "recorded prior to update": (
        "scaler.update() runs without an earlier scaler.step()",
        "call scaler.step(optimizer) in place of optimizer.step(), and scaler.update() only after it, not after each micro-batch",
    ),
}
"""Parts of a GradScaler's errors -> the cause, and what to do."""


def find(trace: Trace) -> Findings:
    """Yield a finding for each wrong order of calls: an error of the GradScaler, or gradients with the wrong scale."""
    error, failure = partial(Finding, "error", phase="optimizer"), trace.failure
    if trace.scaled:
        how = "call scaler.step(optimizer) and scaler.update() in place of optimizer.step()"
        message = f"{trace.setup.optimizer} steps with gradients that are still multiplied by the loss scale"
        cause = "optimizer.step() runs without scaler.unscale_(optimizer) and scaler.step(optimizer)"
        yield error(message, cause=cause, fixes=(advice("optimizer.step()", how),))
    if trace.unscaled:
        message = f"{trace.setup.optimizer} steps with gradients that are divided by the loss scale, but the loss was not multiplied by it"
        cause = "loss.backward() runs on a loss that is not the result of scaler.scale(loss)"
        yield error(message, cause=cause, fixes=(advice("scaler.scale", _SCALE),))
    if trace.repeated is not None:
        first, second = map(short, trace.repeated)
        yield Finding(
            "error" if trace.setup.scaler else "warning",
            f"{trace.setup.optimizer} steps twice with the same gradients",
            phase="optimizer",
            source=trace.repeated[1],
            cause=f"no backward runs between the step at {first} and the step at {second}",
            fixes=(advice(second, _TWICE_SCALED if trace.setup.scaler else _TWICE),),
        )
    for words, (cause, how) in REFUSALS.items():
        if failure is not None and words in failure.error:
            message = f"the GradScaler refuses a call: {failure.error.partition(': ')[2]}"
            yield error(message, cause=cause, source=failure.source, fixes=(advice(failure.source, how),))
    unscaled = next((at for at, call in enumerate(trace.calls) if call.phase == "unscale"), 0)
    backward = [call for call in trace.calls[:unscaled] if call.by_script and call.of_gradient]
    measured = next((at for at, call in enumerate(backward) if "norm." in call.op), len(backward))
    clips = [c for at, c in enumerate(backward) if _CLIPS.match(c.op) and (at > measured or "clamp" in c.op)]
    if not clips:
        return
    where = short(clips[0].source) or "the clipping"
    how = f"call scaler.unscale_(optimizer) before {where}"
    if in_library(clips[0].source):
        # Lightning unscales in each step, and nothing else may unscale before the step.
        how = "multiply the limit of the clipping by scaler.get_scale()"
    yield finding_at(
        "warning",
        "gradients are clipped while they are still multiplied by the loss scale",
        clips,
        cause=f"{where} runs before the gradients are unscaled",
        fixes=(advice(clips[0].source, how),),
    )
