"""
**What it means.** The fused kernels of layer norm and similar norms take weight and bias in the input's
dtype, or both in float32 on some devices; anything else raises.

**Why it happens.** Norm weights were upcast to float32 for stability and the input stayed in 16 bits, or one
of weight and bias was cast and the other was not.

**An example that fails**

    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    model(**batch)      # expected scalar type BFloat16 but found Float

**Repaired**

    isotype.repair(model, isotype.check(model, batch))

**How safe is the fix?** A boundary computes the norm in the dtype of its input and does not change the stored
weight.

**Seen in** tloen/alpaca-lora #313; unslothai/unsloth-zoo #680; huggingface/transformers #30945.
"""

from __future__ import annotations

from isotype.rules.kit.contract_rule import contract_rule
from isotype.rules.kit.groups import Claim

TITLE = "A norm whose weight has another dtype than its input"

_NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm", "instance_norm")
CLAIMS = (Claim("operator", lambda broken: broken.runs(*_NORMS)),)

find = contract_rule(__name__, "{given} instead of {expected} in a norm")
