"""
**What it means.** On a CPU with AVX512-BF16, bitsandbytes repacks every 4-bit weight in place during the first forward
in eval mode. For some shapes the repacking raises an error. Repacked weights pass no gradient, so a training that
continues is wrong.

**Why it is bad.** The new layout has blocks of 32 rows and scales per row. If a weight's rows are not a
multiple of 32, or its columns are not a multiple of the block size (64 × 96), `evaluate` or `generate` raises
an error. The scales of a repacked weight are rounded to bfloat16. bitsandbytes has no backward for the new layout, so no
gradient passes through the layer: a loop that evaluates between steps learns from wrong gradients.

**Why it happens.** `Linear4bit.forward` repacks when the module is in eval mode and its input needs no
gradient. GPUs and CPUs without AVX512-BF16 keep the layout.

**An example that fails**

    model.eval()
    model.generate(**prompt)     # shape '[64, 1]' is invalid for input of size 96

**Repaired**

    isotype.enforce(model, policy)                      # or isotype.load: keeps the training layout
    for layer in linear4bit_layers: layer.support_avx512bf16_for_cpu = False

**How safe is the fix?** The weights keep the loaded layout; generation on such a CPU cannot use bitsandbytes'
fused kernel.

**Seen in** bitsandbytes 0.50: `_convert_weight_packed_for_cpu` in `bitsandbytes/functional.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Finding, Severity
from isotype.records.trace import Trace
from isotype.rules.kit.weight_sets import count, finding_of, modules, quantized
from isotype.rules.kit.words import fix

TITLE = "4-bit weights that an evaluation on this CPU repacks"


def find(trace: Trace) -> Iterator[Finding]:
    setup = trace.setup
    if not setup.profile.repacks_4bit:
        return
    repacked = [(weight, state) for weight, state in quantized(trace) if state.repacking is not None]
    failing = [(weight, state) for weight, state in repacked if state.repacking]
    weights = [weight for weight, _ in failing or repacked]
    device = setup.profile.title
    severity: Severity = "error" if failing else "warning"
    if failing:
        message = (
            f"an evaluation on {device} raises: bitsandbytes cannot repack {count(weights)} 4-bit weights"
        )
        cause = f"{weights[0].module}: {failing[0][1].repacking}"
    elif weights and "backward" in setup.phases:
        message = f"the first evaluation on {device} repacks {count(weights)} 4-bit weights, and the new layout has no backward"
        cause = f"bitsandbytes repacks {weights[0].module} when it is evaluated"
    else:
        return
    keep = fix("keep the layout that trains", "layout", modules(weights), "training")
    severity = severity if "generate" in setup.phases else "note"
    yield finding_of("IST407", severity, message, weights, cause=cause, fixes=(keep,))
