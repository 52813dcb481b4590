"""A dtype mismatch that occurs only in the backward

**What it means.** The forward runs, but an operator of the backward gets operands of two dtypes and raises an error.

**Why it happens.** The backward of a custom `autograd.Function` dequantizes a packed weight to the dtype that is stored beside it
(bitsandbytes: `quant_state.dtype`). This is the checkpoint's dtype, but the Function multiplies the dequantized weight by a gradient in the
compute dtype. The same error occurs if only the forward ran under autocast, or if a loss (`huber_loss`, `smooth_l1_loss`) gets a 16-bit
prediction and a float32 target, which its forward accepts.

**An example that fails**

    @staticmethod
    def backward(ctx, grad):                                  # float16 under fp16=True
        weight = dequantize(ctx.packed, ctx.quant_state)      # bfloat16: the checkpoint's dtype
        return grad @ weight

**Repaired**

    model = isotype.load(path, policy)      # sets quant_state.dtype; policy: see isotype.resolve_precision
    # or, in the Function: torch.amp.custom_fwd / custom_bwd, and weight.to(grad.dtype)

    # or, for a loss whose backward needs one dtype:
    F.huber_loss(prediction.float(), target.float())

**How safe is the fix?** The fix is safe: a new `quant_state.dtype` changes neither the packed codes nor their scales. For a Function of
your own code there is no automatic fix: write a cast in its backward, or use `custom_bwd`, which restores the forward's autocast.

**Seen in** unslothai/unsloth #4005, #4918, #5766, #212; pytorch/ao #4616; unslothai/unsloth #320; NVIDIA-NeMo/Automodel #3652;
67372a/LoRA_Easy_Training_Scripts #8.
"""

from dataclasses import replace

from isotype.records.trace import Trace
from isotype.rules.kit import contract_rule
from isotype.rules.kit.findings import Findings, advice
from isotype.rules.kit.groups import Claim

_HEADLINE = "{given} instead of {expected} in the backward"
_OF_LOSSES = "compute the loss in float32: write .float() after the prediction and the target"
_HOW = "bring the operands to one dtype in the Function's backward (torch.amp.custom_fwd and custom_bwd), and return each gradient in its parameter's dtype"

CLAIMS = (Claim("phase", lambda b: b.call.phase == "backward" and not b.call.recomputed, _HEADLINE),)


def find(trace: Trace) -> Findings:
    for finding in contract_rule.find(__name__, trace):
        # A Function calls no operator like `huber_loss_backward`: autograd does.
        in_function = [] if "_backward" in finding.op else [advice(finding.source, _HOW, "custom_bwd")]
        of_loss = [advice("the loss", _OF_LOSSES, "float32")] if "loss_backward" in finding.op else []
        yield replace(finding, fixes=(*of_loss, *finding.fixes, *in_function))
