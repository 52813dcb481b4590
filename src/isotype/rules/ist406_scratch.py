"""
**What it means.** An operator writes into, or reads from, a tensor that the code keeps outside of the model, and that
tensor has another dtype than this model.

**Why it happens.** A library allocates a scratch buffer once, for the first model it sees (for dequantized weights, for a
cache, for a table of positions), and gives the same buffer to the next model. The first model was bfloat16, the second
is float16.

**An example that fails**

    BUFFER = None
    def dequantize(weight, state):
        global BUFFER
        if BUFFER is None:
            BUFFER = torch.empty(state.shape, dtype=state.dtype)     # the first model's dtype, for ever
        return dequantize_4bit(weight, state, out=BUFFER)

**Repaired**

    buffer = workspace[weight.device, torch.cuda.current_stream(), state.dtype, state.shape]

**How safe is the fix?** A buffer for each device, stream and dtype gives every model its own; allocating again each time is
safe too, and slower. Only the owner of that code can change it, so the fix is advice.

**Seen in** unslothai/unsloth #4026.
"""

from __future__ import annotations

from isotype.records.finding import Finding, Fix
from isotype.records.trace import SHARED
from isotype.rules.kit.claims import Broken, Claim
from isotype.rules.kit.contract_rule import contract_rule
from isotype.rules.kit.words import advice

TITLE = "A shared scratch tensor with another dtype"


def _is_shared(broken: Broken) -> bool:
    # What an optimizer was given from outside is its own state.
    return broken.mismatched.origin.cause.kind in SHARED and broken.call.phase != "optimizer"


CLAIMS = (Claim("tensor", _is_shared, settled=False),)


def _own_tensor(finding: Finding) -> Fix:
    expected = finding.message.rpartition(" ")[2]
    how = (
        f"allocate that tensor in the dtype of the model that uses it ({expected}): keep one for each device, stream "
        "and dtype"
    )
    return advice(finding.source, how, "key the buffer by dtype")


find = contract_rule(__name__, "a shared {given} tensor meets {expected}", _own_tensor)
