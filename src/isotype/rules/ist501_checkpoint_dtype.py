"""
**What it means.** The frozen weights have another dtype than the checkpoint (`dtype` in the model's config), and no
policy requests it.

**Why it is bad.** A bfloat16 checkpoint in float32 takes twice the memory and runs at the float32 rate, but
has no more digits. A bfloat16 checkpoint in float16 may overflow (largest value 65,504 against 3.4e38) and
rounds small weights to zero. A float16 checkpoint in bfloat16 loses three of eleven bits of each weight.

**Why it happens.** `from_pretrained(…, dtype=torch.float32)` (the default before transformers 5) or a loader
with a fixed dtype has cast the weights, or `.float()` or `.half()` has cast them after loading. Or the config
names another dtype than that of the weights in the file.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(path).float()       # config.dtype: bfloat16

**Repaired**

    model = isotype.load(path, isotype.resolve_precision(path))      # or dtype="auto"

**What is not reported.**

- trainable weights, adapters, quantized layers, and weights that the model's author keeps in float32;
- dtypes that the policy requests;
- a checkpoint dtype that the device does not run natively;
- a float32 checkpoint in 16 bits: a script has to request this cast.

**How safe is the fix?** Safe if the checkpoint's dtype represents every value of the weights (it does if the values
come from the checkpoint), else unsafe. Rounded digits can only be restored by loading the weights again.

**Seen in** facebookresearch/metaseq #254; huggingface/peft #2421; axolotl #902.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import format_bytes
from isotype.records.finding import Cost, Finding, Severity
from isotype.records.trace import FLOATS, Trace, Weight
from isotype.rules.kit import costs
from isotype.rules.kit.weight_sets import cast_fix, extra_bytes, finding_of, is_frozen_base, main_dtype
from isotype.rules.kit.words import advice

TITLE = "Weights that do not have their checkpoint's dtype"

_LOSSES: dict[tuple[torch.dtype, torch.dtype], tuple[Severity, str]] = {
    (torch.bfloat16, torch.float32): ("warning", ""),
    (torch.float16, torch.float32): ("warning", ""),
    (torch.bfloat16, torch.float16): ("warning", "values above 65,504 become infinite, small ones zero"),
    (torch.float16, torch.bfloat16): ("note", "three of eleven bits of each weight are gone"),
}
"""(Dtype of the checkpoint, dtype of the loaded weights) -> severity, and the loss in words."""


def find(trace: Trace) -> Iterator[Finding]:
    named, policy = trace.setup.checkpoint_dtype, trace.setup.policy
    plain = [
        weight
        for weight in trace.weights
        if is_frozen_base(weight) and weight.dtype in FLOATS and weight.kind in ("linear", "embedding")
    ]
    loaded = main_dtype(plain)
    if named is None or loaded is None or (named, loaded) not in _LOSSES:
        return
    if (policy is None or policy.plain != loaded) and trace.setup.profile.supports(named) == "native":
        yield _finding(trace, [weight for weight in plain if weight.dtype == loaded], named, loaded)


def _finding(trace: Trace, weights: Sequence[Weight], named: torch.dtype, loaded: torch.dtype) -> Finding:
    name, wrong = dtype_name(named), dtype_name(loaded)
    extra = extra_bytes(weights, named)
    wide = [call for call in trace.calls if costs.run_dtype(call) == loaded] if extra else []
    severity, loss = _LOSSES[named, loaded]
    cost = Cost(
        flops_share=costs.flops_share(trace, wide),
        memory_bytes=extra,
        slowdown=costs.slowdown(trace, wide, named) if wide else None,
    )
    memory = f": {format_bytes(extra)} more memory" if extra else ""
    return finding_of(
        "IST501",
        severity,
        f"the config names {name}, but the frozen weights are {wrong}{memory}",
        weights,
        phase="load",
        notes=(f"{len(weights)} weights", *((loss,) if loss else ()), *costs.estimate(cost, trace)),
        fixes=(
            cast_fix(f"cast the frozen weights to {name}", weights, named),
            advice("dtype", f"load the checkpoint with dtype={name}", name),
        ),
        cost=cost,
    )
