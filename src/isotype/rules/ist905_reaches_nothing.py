"""
**What it means.** An input that should affect the predictions does not: a picture, a sound, an attention
mask.

**Why it happens.** A wrapper takes the argument and does not pass it on; the row has no token for the
picture, or its features are overwritten; a mask is replaced inside. Only the text is trained.

**An example that fails**

    class Wrapped(nn.Module):
        def forward(self, input_ids, attention_mask=None, labels=None):
            return self.model(input_ids=input_ids, labels=labels)      # the mask is dropped here

**Repaired**

    return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

**What is not reported.** A mask of ones, and one that hides only unused positions (padding after the rows of
a causal model).

**How safe is the fix?** It changes the computation to use the whole batch.

**Seen in** huggingface/transformers #808; TransformerLensOrg/TransformerLens #1607.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.reach import measured_on
from isotype.rules.kit.words import advice

TITLE = "Inputs that reach no prediction"
KIND = "wiring"


def find(trace: Trace) -> Iterator[Finding]:
    """Yield pictures, sounds and masks without any effect on predictions."""
    reach = trace.reach
    for each in () if reach is None else reach.unused:
        if reach is not None and each.kind in ("picture", "input"):
            how = f"pass {each.name} on to the module that uses it"
            if each.kind == "picture":
                how += ", and give the row the tokens that stand for it"
            yield Finding(
                "IST905",
                "error" if each.kind == "picture" else "warning",
                f"{each.name} reaches no prediction",
                cause=f"other values of {each.name} change no logit, to the last bit",
                notes=(measured_on(reach),),
                fixes=(advice(each.name, how),),
            )
