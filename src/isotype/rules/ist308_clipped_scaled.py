"""Calls of a GradScaler or an optimizer in the wrong order

**What it means.** Calls of a GradScaler or an optimizer are missing or in the wrong order. There are five cases:

1. Code clips the gradients while they are still multiplied by the loss scale.
2. The optimizer steps with gradients that are still multiplied by the loss scale.
3. The GradScaler divides gradients by the loss scale, but the loss was not multiplied by the loss scale.
4. An optimizer steps twice with the same gradients: in `scaler.step(optimizer)` and in `optimizer.step()`.
5. The GradScaler raises an error, because `scale()` or `update()` was not called, or `unscale_()` was called twice.

**Why it is bad.** Only case 5 raises an error. The loss scale begins at 65,536.

1. The norm of scaled gradients is therefore nearly always larger than the limit of the clipping. Clipping reduces the norm to the limit,
   and the GradScaler then divides the clipped gradients by the loss scale. SGD stops learning. Such small gradients make Adam's updates
   smaller, because its epsilon is larger than the gradients.
2. With scaled gradients, a step of SGD is up to 65,536 times too large, and a step with infinite gradients is not skipped.
3. With gradients that were divided without a scaled loss, a step of SGD is 65,536 times too small.
4. The update doubles. If `scaler.step()` skips infinite gradients, a following `optimizer.step()` makes weights NaN.

**An example that costs**

    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)

**Repaired**

    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)                                  # does not unscale a second time

**What is not reported.** `isotype check` does not run the clipping and the optimizer steps of a script. Only `isotype run` reports these
cases. The trainers of transformers and Lightning's automatic optimization unscale before they clip.

**How safe is the fix?** The fix is safe: you correct the calls. Each step then uses every gradient once, after the gradient was divided by
the loss scale.

**Seen in** milesial/Pytorch-UNet #468; pytorch/examples #1196; Lightning-AI/pytorch-lightning #9599, #18089, #19695;
harubaru/waifu-diffusion #64; nerfstudio-project/nerfacc #307; starrytong/SCNet #7; microsoft/Swin-Transformer #311; Azure/MS-AMP #45;
Haian-Jin/LVSM #19.
"""

import re
from functools import partial

from isotype.core.names import short
from isotype.records.finding import Finding, in_library
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_at

_CLIPS = re.compile(r"aten\.(_foreach_)?(mul|clamp(_min|_max)?)_\.")
"""The in-place operators that `clip_grad_norm_` and `clip_grad_value_` call."""

_SCALE = "replace loss.backward() by scaler.scale(loss).backward(); with accelerate, by accelerator.backward(loss); with Lightning, by self.manual_backward(loss)"
_UPDATE = "call scaler.update() once after the last scaler.step(), even if the code does not call scaler.step(); after several micro-batches, call unscale_() only once; Lightning calls unscale_() in optimizer.step()"
_TWICE = "remove one of the two steps, or compute new gradients before the second step"
_TWICE_SCALED = (
    "remove optimizer.step(), because scaler.step(optimizer) calls it unless a gradient is infinite or NaN"
)
REFUSALS = {
    "_scale is None": ("no loss was multiplied by the loss scale", _SCALE),
    "has already been called": ("scaler.update() did not run after the earlier call", _UPDATE),
    "is being called after step()": (
        "scaler.step() has already unscaled these gradients",
        "call scaler.unscale_(optimizer) before scaler.step(optimizer)",
    ),
    "recorded prior to update": (
        "scaler.update() runs without an earlier scaler.step()",
        "replace optimizer.step() by scaler.step(optimizer), and call scaler.update() only after scaler.step(), not after each micro-batch",
    ),
}
"""Maps a part of a GradScaler's error message to the cause and the fix."""


def find(trace: Trace) -> Findings:
    """Yield a finding for each wrong order of calls: an error of the GradScaler, or gradients with the wrong scale."""
    error, failure = partial(Finding, "error", phase="optimizer"), trace.failure
    if trace.scaled:
        how = "replace optimizer.step() by scaler.step(optimizer) and scaler.update()"
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
            message = f"a call of the GradScaler raises an error: {failure.error.partition(': ')[2]}"
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
