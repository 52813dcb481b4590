"""
**What it means.** A matmul, or another operator that needs operands of one dtype, gets operands of two dtypes.
PyTorch promotes dtypes in elementwise operators but never in matmuls, so the step crashes at the matmul.

**Why it happens.** Something before the operator changed the dtype: a norm with a float32 weight (`weight * hidden` is
then float32), an embedding that was upcast, or a `.float()` in a custom layer. Or one weight has another dtype than the
other weights.

**An example that fails**

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    model(**batch)   # expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16

**Repaired**

    isotype.repair(model, isotype.check(model, batch))   # each norm returns bfloat16 again

**How safe is the fix?** The fix casts the output of each norm to the compute dtype, as the norms of 16-bit models do.
No stored value changes. A fix that casts a parameter to a narrower dtype is marked as unsafe.

**Seen in** NVIDIA-NeMo/Automodel #1622, #1540, #1633; huggingface/transformers #29974, #25598.
"""

from __future__ import annotations

from isotype.rules.kit.contract_rule import contract_rule
from isotype.rules.kit.groups import Claim

TITLE = "Activations whose dtype differs from that of the weights"
CLAIMS = (Claim("rest", lambda broken: True),)

find = contract_rule(__name__, "{given} instead of {expected} in an operator that requires equal dtypes")
