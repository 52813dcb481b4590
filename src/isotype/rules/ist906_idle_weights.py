"""Adapters and trainable weights that do not affect the loss

**What it means.** The loss does not depend on an adapter or another trainable weight. Its gradient is exactly zero for all values of the
weight.

**Why it happens.** The cause is one of these:

- The adapter's scale is 0 (`lora_alpha=0`, `set_scale(0)`).
- The adapter's result is multiplied by 0, or is overwritten later.
- The forward does not use the trained copy of a module (`modules_to_save`).

**An example that fails**

    config = LoraConfig(r=16, lora_alpha=0, target_modules="all-linear")    # scaling is alpha / r
    train(get_peft_model(model, config))                                    # the loss does not change

**Repaired**

    config = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")

**What is not reported.** The rule ignores experts that get no token of the batch, and weights that IST307 reports. The rule reports weights
that the batch does not use, such as those of a vision tower in a batch of text, only as a note.

**How safe is the fix?** The fix is safe: you let the loss depend on the weight, which is then trained, or you freeze the weight.

**Seen in** huggingface/trl #6617; unslothai/unsloth-zoo #1242, #606 (experts); unslothai/unsloth #5039 (a vision tower);
verl-project/verl #1821 (lora_alpha 0).
"""

from isotype.core.names import plural, starred
from isotype.records.finding import Finding, Severity
from isotype.records.reach import Reach
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, reach_of
from isotype.rules.kit.words import and_others


def find(trace: Trace) -> Findings:
    reach = reach_of(trace)
    yield from _outside(trace, reach)
    idle = [unused for unused in reach.unused if unused.kind in ("adapter", "weight")]
    if not idle:
        return
    names = [unused.name for unused in idle]
    trained = {starred(weight.name) for weight in trace.weights if weight.trainable and not weight.buffer}
    whole = trained <= set(names)
    severity: Severity = "warning" if any(unused.kind == "adapter" for unused in idle) else "note"
    message = f"{len(names)} of {plural(len(trained), 'group')} of trainable weights do not affect the loss"
    if whole:
        severity, message = "error", "the loss depends on no trainable weight"
    cause = f"with random values in every weight, the gradient of {and_others(names)} is exactly zero"
    fix = advice(names[0], "freeze these weights, or make the loss depend on their results")
    if why := next((unused.why for unused in idle if unused.why), ""):
        cause, fix = why, advice("lora_alpha", "set the scale of the adapter (lora_alpha) above 0")
    module, notes = names[0].rpartition(".lora_")[0], (reach.measured,)
    yield Finding(severity, message, module, phase="backward", cause=cause, notes=notes, fixes=(fix,))


def _outside(trace: Trace, reach: Reach) -> Findings:
    """Yield one note on trainable weights that the loss does not depend on, except those that IST307 reports."""
    reported = {starred(part.weight) for part in trace.unreached}
    ungraded = (unused.name for unused in reach.unused if unused.kind == "ungraded")
    names = [name for name in ungraded if name not in reported]
    if names:
        hangs = "under DDP without find_unused_parameters, a step with such weights hangs or fails (IST705)"
        yield Finding(
            "note",
            f"trainable weights without a gradient from this batch: {and_others(names)}",
            module=names[0].rpartition(".")[0],
            phase="backward",
            cause="with this batch, the modules of these weights do not run or get no tokens, or nothing uses their results",
            notes=(hangs, reach.measured),
            fixes=(advice(names[0], "freeze these weights (requires_grad_(False)) if no batch uses them"),),
        )
