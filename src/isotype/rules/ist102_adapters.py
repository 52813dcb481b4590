"""An adapter whose dtype differs from the dtype of its layer

**What it means.** The weights of an adapter have another dtype than the input of their layer, and no code casts this input. Here, adapters
are the weights of LoRA, LoKr, DoRA and prompt tuning, and trained copies of modules (`modules_to_save`).

**Why it happens.** Adapters are usually float32, because an optimizer loses small updates of 16-bit weights. A 16-bit layer has to cast its
input to the adapter's dtype, and cast the adapter's result back to 16 bits, as PEFT's layers do. Custom adapters often lack these two
casts. In PEFT, `autocast_adapter_dtype=False` leaves an adapter in another dtype than the base model. `cast_input_dtype_enabled=False`
turns off the casts.

**An example that fails**

    class LoraLinear(nn.Linear):                       # float32 lora_a, lora_b on a bfloat16 layer
        def forward(self, x):
            return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)

**Repaired**

    isotype.repair(model, isotype.check(model, batch))  # the layer computes in bfloat16; lora_a, lora_b stay float32

**How safe is the fix?** The first fix is safe: for each matmul, it casts the adapter's float32 weights to the compute dtype, as autocast
does. This fix does not change the stored weights. A fix that casts the stored weights to bfloat16 is unsafe, because bfloat16 loses small
updates (IST801).

**Seen in** NVIDIA-NeMo/Automodel #1540; huggingface/peft #1172, #1249; axolotl #3310.
"""

import math

from isotype.core.names import in_module
from isotype.records.trace import Operand
from isotype.rules.kit.groups import Broken, Claim
from isotype.trace.sides import is_adapter


def _is_of_adapter(operand: Operand, broken: Broken) -> bool:
    """Return True if `operand` is an adapter's weight, or has its wrong dtype because of an adapter's weight.

    A weight can also determine the dtype of an operator's output. Therefore the operator must run in the module of
    the weight, or take all elements of the weight.
    """
    origin, owner = operand.origin, broken.trace.owners.get(operand.origin.name)
    if origin.kind not in ("parameter", "buffer") or not is_adapter(origin.name, owner):
        return False
    if owner is None or operand is broken.mismatched:
        return True
    return in_module(broken.call.module, owner.module) or math.prod(operand.shape) == math.prod(owner.shape)


_HEADLINE = "{given} instead of {expected} in the matmul of an adapter"
CLAIMS = (Claim("operand", lambda b: any(_is_of_adapter(o, b) for o in b.call.operands), _HEADLINE),)
