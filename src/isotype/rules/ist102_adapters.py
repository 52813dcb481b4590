"""An adapter of another dtype than its layer

**What it means.** An adapter's weights have another dtype than their layer's input, and no code casts this input.
Adapters are the weights of LoRA, LoKr, DoRA and prompt tuning, and trained copies of modules (`modules_to_save`).

**Why it happens.** Adapters should be float32, because the optimizer updates them. A 16-bit layer has to cast its
input to the adapter's dtype, and cast the adapter's result back to 16 bits, as PEFT's layers do. Custom
adapters often lack these casts. In PEFT, the dtypes differ if `autocast_adapter_dtype=False` leaves the
adapter in another dtype than the base, or if `cast_input_dtype_enabled` is off.

**An example that fails**

    class LoraLinear(nn.Linear):                       # float32 lora_a, lora_b on a bfloat16 layer
        def forward(self, x):
            return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)

**Repaired**

    isotype.repair(model, isotype.check(model, batch))  # the layer computes in bfloat16; lora_a, lora_b stay float32

**How safe is the fix?** Safe: for each matmul, the fix casts the adapter's float32 weights to the compute dtype, as
autocast does. The stored weights do not change. Unsafe: a cast of the stored weights to bfloat16, because bfloat16
loses small updates (IST801).

**Seen in** NVIDIA-NeMo/Automodel #1540; huggingface/peft #1172, #1249; axolotl #3310.
"""

import math

from isotype.core.names import in_module
from isotype.records.trace import Operand
from isotype.rules.kit.groups import Broken, Claim
from isotype.trace.sides import is_adapter


def _is_of_adapter(operand: Operand, broken: Broken) -> bool:
    """Return whether `operand` is an adapter's weight, or is to blame because of one.

    The dtype of an output also comes from a weight. Therefore the operator must run in the weight's module, or take all
    of its elements.
    """
    origin, owner = operand.origin, broken.trace.owners.get(operand.origin.name)
    if origin.kind not in ("parameter", "buffer") or not is_adapter(origin.name, owner):
        return False
    if owner is None or operand is broken.mismatched:
        return True
    return in_module(broken.call.module, owner.module) or math.prod(operand.shape) == math.prod(owner.shape)


_HEADLINE = "{given} instead of {expected} in an adapter"
CLAIMS = (Claim("operand", lambda b: any(_is_of_adapter(o, b) for o in b.call.operands), _HEADLINE),)
