"""
**What it means.** Training runs under autocast, which hides that the model's own dtypes do not fit; evaluation or
generation outside of it raises.

**Why it happens.** Float32 adapters, norms or heads in a 16-bit model rely on autocast. `model.generate` in a callback, a
pipeline or after training runs without it.

**An example that fails**

    trainer.train()                  # bf16=True: under autocast
    model.generate(**prompt)         # expected m1 and m2 to have the same dtype

**Repaired**

    isotype.enforce(model, policy)   # the model's own borders cast; no autocast needed
    # or: with torch.autocast(device, dtype): model.generate(**prompt)

**How safe is the fix?** Boundaries cast activations only, never stored weights.

**Seen in** huggingface/trl #1203; huggingface/diffusers #10617; hiyouga/LLaMA-Factory #5480; unslothai/unsloth #3723.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.rules.finding import Finding
from isotype.rules.kit import operands
from isotype.trace.record import Trace

TITLE = "Evaluation or generation outside of autocast"


def find(trace: Trace) -> Iterator[Finding]:
    """Operators of the generate phase with operands of different dtypes."""
    return operands.find(
        trace, "IST108", "{odd} meets {expected} in evaluation or generation, where autocast is off"
    )
