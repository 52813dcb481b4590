"""Weights that do not have their checkpoint's dtype

**What it means.** The frozen weights have another dtype than the checkpoint (`dtype` in its `config.json`, or else in the model's config). The
precision policy does not request this dtype.

**Why it is bad.** A bfloat16 checkpoint that is loaded in float32 takes twice the memory and computes at the rate of float32, but gains no
digits. In float16, a value of a bfloat16 checkpoint above 65,504 overflows, and small weights become zero. A float16 checkpoint that is
loaded in bfloat16 loses three of the eleven significant bits of each weight.

**Why it happens.** `from_pretrained(…, dtype=torch.float32)` (the default before transformers 5) or a loader with a fixed dtype has cast
the weights. A call of `.float()` or `.half()` after loading has the same effect. In other cases, the dtype in the config is not the dtype
of the weights in the file.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(path).float()       # config.dtype: bfloat16

**Repaired**

    model = isotype.load(path, isotype.resolve_precision(path))      # or dtype="auto"

**What is not reported.**

- trainable weights, adapters, quantized layers, and weights that the model's author keeps in float32;
- float32 weights in a model whose frozen values are mostly quantized (IST203 reports these weights);
- weights in the dtype that the policy requests;
- weights of a checkpoint whose dtype the device does not run natively;
- float32 checkpoints that are loaded in 16 bits, because the user must have requested this cast.

**How safe is the fix?** The fix is safe if the checkpoint's dtype represents every value of the loaded weights; otherwise the fix is
unsafe. If the earlier cast to the wrong dtype has rounded the weights, load the checkpoint again.

**Seen in** facebookresearch/metaseq #254; huggingface/transformers #34743; huggingface/peft #2421; axolotl #902.
"""

import torch

from isotype.core.dtypes import FLOATS, dtype_name
from isotype.core.names import format_bytes, plural
from isotype.records.finding import Cost, Finding, Severity
from isotype.records.trace import Trace, Weight
from isotype.rules.kit import costs
from isotype.rules.kit.findings import Findings, advice, finding_of
from isotype.rules.kit.weight_sets import (
    cast_fix,
    elements,
    extra_bytes,
    is_frozen_base,
    main_dtype,
    quantized,
)

_RANGE_LOST = "values above 65,504 become infinite, and small values become zero"
_LOSSES: dict[tuple[torch.dtype, torch.dtype], tuple[Severity, str]] = {
    (torch.bfloat16, torch.float32): ("warning", ""),
    (torch.float16, torch.float32): ("warning", ""),
    (torch.bfloat16, torch.float16): ("warning", _RANGE_LOST),
    (torch.float16, torch.bfloat16): ("note", "each weight loses three of its eleven significant bits"),
}
"""Maps (dtype of the checkpoint, dtype of the loaded weights) to the severity, and to the values or digits that are lost."""


def find(trace: Trace) -> Findings:
    named, policy = trace.setup.checkpoint_dtype, trace.setup.policy
    frozen = [w for w in trace.weights if is_frozen_base(w) and w.dtype in FLOATS]
    plain = [weight for weight in frozen if weight.kind in ("linear", "embedding")]
    loaded = main_dtype(plain)
    if named is None or loaded is None or (named, loaded) not in _LOSSES:
        return
    if loaded == torch.float32 and elements([w for w, _ in quantized(trace)]) > elements(frozen):
        return  # only the rest of a quantized model is float32: IST203
    if (policy is None or policy.plain != loaded) and trace.setup.profile.supports(named) == "native":
        yield _finding(trace, [weight for weight in plain if weight.dtype == loaded], named, loaded)


def _finding(trace: Trace, weights: list[Weight], named: torch.dtype, loaded: torch.dtype) -> Finding:
    name, wrong = dtype_name(named), dtype_name(loaded)
    extra = extra_bytes(weights, named)
    wide = [call for call in trace.calls if call.run_dtype == loaded] if extra else []
    severity, loss = _LOSSES[named, loaded]
    slowdown = costs.slowdown(trace, wide, named) if wide else None
    cost = Cost(costs.flops_share(trace, wide), memory_bytes=extra, slowdown=slowdown)
    memory = f": {format_bytes(extra)} more memory" if extra else ""
    return finding_of(
        severity,
        f"the checkpoint's config names {name}, but the frozen weights are {wrong}{memory}",
        weights,
        phase="load",
        notes=(plural(len(weights), "weight"), *((loss,) if loss else ()), *costs.estimate(cost, trace)),
        fixes=(
            cast_fix(f"cast the frozen weights to {name}", weights, named),
            advice("dtype", f"load the checkpoint with dtype={name}", name),
        ),
        cost=cost,
    )
