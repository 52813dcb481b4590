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

Other values of the input are tried on a small copy of the model. If no copy can be made, the operators decide: an input that none of them passes on
to the loss cannot change it.

**What is not reported.** A mask of ones, and one that hides only unused positions (padding after the rows of
a causal model).

**How safe is the fix?** It changes the computation to use the whole batch.

**Seen in** huggingface/transformers #808; TransformerLensOrg/TransformerLens #1607.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Finding, Severity
from isotype.records.trace import Trace
from isotype.rules.kit.reach import measured_on
from isotype.rules.kit.words import advice

TITLE = "Inputs that reach no prediction"
KIND = "wiring"


_PICTURES = ("pixel", "features", "audio", "image")


def find(trace: Trace) -> Iterator[Finding]:
    """Yield pictures, sounds and masks without any effect on predictions."""
    reach = trace.reach
    if reach is None:
        return
    for each in reach.unused:
        if each.kind in ("picture", "input"):
            cause = f"other values of {each.name} change no logit, to the last bit"
            yield _finding(each.name, each.kind == "picture", cause, measured_on(reach))
    for name in trace.without_effect if reach.undecided else ():
        picture = any(word in name for word in _PICTURES)
        if picture or name == "attention_mask":
            cause = f"no operator of the forward passes {name} on to the loss"
            yield _finding(name, picture, cause, f"by structure alone: {reach.undecided[0]}")


def _finding(name: str, picture: bool, cause: str, note: str) -> Finding:
    how = f"pass {name} on to the module that uses it"
    if picture:
        how += ", and give the row the tokens that stand for it"
    severity: Severity = "error" if picture else "warning"
    return Finding(
        "IST905",
        severity,
        f"{name} reaches no prediction",
        cause=cause,
        notes=(note,),
        fixes=(advice(name, how),),
    )
