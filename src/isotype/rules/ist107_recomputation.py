"""
**What it means.** Gradient checkpointing runs parts of the forward again during the backward, and there they meet other
dtypes than at first.

**Why it happens.** The forward ran under autocast and the backward outside of it, and the checkpointing function does not
restore the autocast state (a checkpoint of one's own, a hook, a custom Function); or the weights were cast in between.

**An example that fails**

    class Checkpoint(torch.autograd.Function):
        def backward(ctx, grad):
            with torch.enable_grad():
                output = ctx.layer(*ctx.inputs)     # autocast is off here

**Repaired**

    torch.utils.checkpoint.checkpoint(layer, *inputs, use_reentrant=False)   # restores autocast

**How safe is the fix?** PyTorch's own checkpoint restores the autocast state and loses nothing.

**Seen in** pytorch/pytorch #193338, #71124; NVIDIA/TransformerEngine #791.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.rules import operands
from isotype.rules.finding import Finding
from isotype.trace.record import Trace

TITLE = "Recomputation in other dtypes than the forward"


def find(trace: Trace) -> Iterator[Finding]:
    """Operators that gradient checkpointing runs again, with operands of different dtypes."""
    return operands.find(
        trace, "IST107", "{odd} meets {expected} while gradient checkpointing recomputes the forward"
    )
