"""A norm whose weight has another dtype than its input

**What it means.** The fused kernels of layer norm and similar norms need weight and bias in the dtype of the input. Some kernels, such as
layer norm on a CPU, also accept a float32 weight and bias. All other dtypes of weight or bias raise an error.

**Why it happens.** Code cast the norm's weights to float32 for stability, but the norm's input stayed in 16 bits. In other cases, code cast
the weight of the norm, but not its bias.

**An example that fails**

    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    model(**batch)      # expected scalar type BFloat16 but found Float

**Repaired**

    isotype.repair(model, isotype.check(model, batch))

**How safe is the fix?** The fix is safe if the norm computes in the dtype of its input, because its kernel still accumulates in float32.
The fix is unsafe if it casts the stored weight or bias of the norm and may round values.

**Seen in** tloen/alpaca-lora #313; unslothai/unsloth-zoo #680; huggingface/transformers #30945; GVCLab/PersonaLive #57.
"""

from isotype.rules.kit.groups import Claim

_NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm", "instance_norm")
_HEADLINE = "{given} instead of {expected} in a norm"
CLAIMS = (Claim("operator", lambda broken: broken.runs(*_NORMS), _HEADLINE),)
