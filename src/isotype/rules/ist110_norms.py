"""A norm whose weight has another dtype than its input

**What it means.** The fused kernels of layer norm and similar norms need weight and bias in the input's dtype. Some
kernels also accept a float32 weight and bias, such as layer norm on a CPU. Any other dtype raises an error.

**Why it happens.** The norm's weights were cast to float32 for stability, but its input stayed in 16 bits. Or the
weight was cast, but not the bias.

**An example that fails**

    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    model(**batch)      # expected scalar type BFloat16 but found Float

**Repaired**

    isotype.repair(model, isotype.check(model, batch))

**How safe is the fix?** Safe: the norm computes in its input's dtype, and its kernel still adds up in float32. Unsafe:
a cast of the norm's stored weight or bias that may round its values.

**Seen in** tloen/alpaca-lora #313; unslothai/unsloth-zoo #680; huggingface/transformers #30945; GVCLab/PersonaLive #57.
"""

from isotype.rules.kit.groups import Claim

_NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm", "instance_norm")
_HEADLINE = "{given} instead of {expected} in a norm"
CLAIMS = (Claim("operator", lambda broken: broken.runs(*_NORMS), _HEADLINE),)
