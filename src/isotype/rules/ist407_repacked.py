"""4-bit weights that an evaluation on a CPU repacks

**What it means.** On a CPU with AVX512-BF16, bitsandbytes changes the order of the codes of every 4-bit weight in place (repacking). This
happens during the first forward in eval mode. For weights of some shapes, the repacking raises an error. A repacked layer passes no
gradient to its input, so the steps after an evaluation train with wrong gradients.

**Why it is bad.** The repacking raises an error for some shapes. Repacking needs a number of rows that is a multiple of 32, and a number of
columns that is a multiple of the quantization block (64 weights by default). For example, `generate` raises an error for a weight of 64
× 96. Repacking also rounds the scales to bfloat16. bitsandbytes has no backward for the repacked weights. If the weights were repacked
before the checked step, the step's gradients are wrong, and the finding is an error.

**Why it happens.** `Linear4bit.forward` repacks the weight if the module is in eval mode and the input requires no gradient.

**An example that fails**

    model.eval()
    model.generate(**prompt)     # shape '[64, 1]' is invalid for input of size 96

**Repaired**

    isotype.enforce(model, policy)    # keeps the layout that has a backward, like isotype.load
    # without isotype:
    for layer in linear4bit_layers: layer.support_avx512bf16_for_cpu = False

**How safe is the fix?** The fix is safe: the weights stay in the layout in which they were loaded. Generation on such a CPU is slower,
because it does not use the fused kernel of bitsandbytes. If the weights are already repacked, load the model again.

**Seen in** bitsandbytes 0.50: `_convert_weight_packed_for_cpu` in `bitsandbytes/functional.py`.
"""

from isotype.records.finding import Severity
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_of, fix
from isotype.rules.kit.weight_sets import counted, modules, quantized, repacked


def find(trace: Trace) -> Findings:
    setup = trace.setup
    cut = {call.module for call in trace.calls if call.cuts}
    failed = trace.failure is not None and trace.failure.recomputed  # see IST107
    done = [weight for weight in repacked(trace) if failed or weight.module in cut]
    if done and "backward" in setup.phases:
        message = f"bitsandbytes has repacked {counted(done, '4-bit weight')} for this CPU: the new layout has no backward"
        cause = f"{done[0].module} was evaluated without gradients before this step"
        how = "load the model again, and set support_avx512bf16_for_cpu = False on its 4-bit layers before the first evaluation"
        fixes = (advice(done[0].module, how),)
        yield finding_of("error", message, done, phase="load", cause=cause, fixes=fixes)
    if not setup.profile.repacks_4bit:
        return
    to_repack = [(weight, state) for weight, state in quantized(trace) if state.repacking is not None]
    failing = [(weight, state) for weight, state in to_repack if state.repacking]
    weights = [weight for weight, _ in failing or to_repack]
    device, amount = setup.profile.title, counted(weights, "4-bit weight")
    severity: Severity = "error" if failing else "warning"
    if failing:
        message = f"an evaluation on {device} raises: bitsandbytes cannot repack {amount}"
        cause = f"{weights[0].module}: {failing[0][1].repacking}"
    elif weights and "backward" in setup.phases:
        message = f"the first evaluation on {device} repacks {amount}, and the new layout has no backward"
        cause = f"bitsandbytes repacks {weights[0].module} when it is evaluated"
    else:
        return
    keep = fix("keep the layout of the weights that has a backward", "layout", modules(weights), "training")
    severity = severity if "generate" in setup.phases else "note"
    yield finding_of(severity, message, weights, cause=cause, fixes=(keep,))
