"""A shared scratch tensor with another dtype

**What it means.** An operator reads or writes a scratch tensor: a tensor outside of the model, such as a global, that several calls use.
This scratch tensor has another dtype than the model.

**Why it happens.** A library allocates a buffer in the dtype of the first model, for example bfloat16. The library uses the same buffer for
a second model, which is float16. The buffer holds dequantized weights, a cache or a table of positions.

**An example that fails**

    BUFFER = None
    def dequantize(weight, state):
        global BUFFER
        if BUFFER is None:
            BUFFER = torch.empty(state.shape, dtype=state.dtype)     # the first model's dtype, forever
        return dequantize_4bit(weight, state, out=BUFFER)

**Repaired**

    buffer = workspace[weight.device, torch.cuda.current_stream(), state.dtype, state.shape]     # a dictionary

**How safe is the fix?** The fix is safe: with one buffer for each device, stream, dtype and shape, every model gets a buffer in its dtype.
A new buffer for each call is also safe, but slower. You have to edit the library's code.

**Seen in** unslothai/unsloth #4026.
"""

from dataclasses import replace

from isotype.records.trace import SHARED, Trace
from isotype.rules.kit import contract_rule
from isotype.rules.kit.findings import Findings, advice
from isotype.rules.kit.groups import Broken, Claim


def _is_shared(broken: Broken) -> bool:
    # An optimizer's tensor outside of the model is the optimizer's state.
    return broken.mismatched.origin.cause.kind in SHARED and broken.call.phase != "optimizer"


_HEADLINE = "a tensor outside of the model is {given}, but the other operands are {expected}"
CLAIMS = (Claim("tensor", _is_shared, _HEADLINE, settled=False),)


def find(trace: Trace) -> Findings:
    for finding in contract_rule.find(__name__, trace):
        expected = finding.message.rpartition(" ")[2]
        how = f"allocate that tensor in the dtype of the model that uses it ({expected}): keep one for each device, stream and dtype"
        one_each = advice(finding.source, how, "use a separate buffer for each dtype")
        yield replace(finding, fixes=(*finding.fixes, one_each))
