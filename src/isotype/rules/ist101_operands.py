"""Activations whose dtype differs from the dtype of the weights

**What it means.** A matmul, or another operator that needs operands of one dtype, gets operands of two dtypes. PyTorch promotes dtypes in
elementwise operators but never in matmuls, so the step crashes at the matmul.

**Why it happens.** A module before the operator returned another dtype than the weights have. Examples are a norm with a float32 weight, an
embedding that other code cast to float32, and a custom layer that calls `.float()`. In other cases, one weight has another dtype than all
other weights.

**An example that fails**

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    model(**batch)   # q_proj: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16

**Repaired**

    isotype.repair(model, isotype.check(model, batch))   # casts the norms' outputs to bfloat16

**How safe is the fix?** The fix is safe if it casts only the inputs or outputs of a module, or a result at a line, because no stored
weight changes. The fix is unsafe if it casts a stored weight whose values may be rounded. `isotype.repair` applies unsafe fixes only with `unsafe=True`.

**Seen in** NVIDIA-NeMo/Automodel #1622, #1540, #1633; huggingface/transformers #29974, #25598.
"""

from isotype.rules.kit.groups import Claim

_HEADLINE = "{given} instead of {expected} in an operator that requires equal dtypes"
CLAIMS = (Claim("rest", lambda broken: True, _HEADLINE),)
