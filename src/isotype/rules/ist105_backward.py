"""
**What it means.** The forward runs, but the backward raises an error: one of its operators gets two dtypes.

**Why it happens.** A custom `autograd.Function` computes its gradients by hand. Its backward dequantizes a weight to
the dtype of the quantization state (the checkpoint's dtype), and multiplies the weight with a gradient in the compute
dtype. Or the backward runs outside of the autocast region in which the forward ran.

**An example that fails**

    @staticmethod
    def backward(ctx, grad):                                  # float16 under fp16=True
        weight = dequantize(ctx.packed, ctx.quant_state)      # bfloat16: the checkpoint's dtype
        return grad @ weight

**Repaired**

    model = isotype.load(path, policy)      # the user's dtype reaches the quantization state
    # or, in the Function: torch.amp.custom_fwd / custom_bwd, and weight.to(grad.dtype)

**How safe is the fix?** Setting the state's dtype loses nothing: the packed codes and their scales are
untouched. Only you can write the casts inside of the Function.

**Seen in** unslothai/unsloth #4005, #4918, #5766, #212.
"""

from __future__ import annotations

from isotype.rules.kit.contract_rule import contract_rule
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.words import advice

TITLE = "A dtype mismatch in the backward only"
CLAIMS = (Claim("phase", lambda broken: broken.call.phase == "backward" and not broken.call.recomputed),)

_HOW = (
    "bring the operands to one dtype in the Function's backward (torch.amp.custom_fwd and custom_bwd), and "
    "return each gradient in its parameter's dtype"
)

find = contract_rule(
    __name__,
    "{given} instead of {expected} in the backward",
    lambda finding: advice(finding.source, _HOW, "custom_bwd"),
)
