"""Inputs that affect no prediction

**What it means.** An image, an audio clip or an attention mask should affect the predictions, but has no effect. The model is trained as if
this input were missing.

**Why it happens.** A wrapper accepts the input and does not pass it on, or the row has no token for the image. In other cases, the model
replaces the features of the image, or the mask, by other values.

**An example that fails**

    class Wrapped(nn.Module):
        def forward(self, input_ids, attention_mask=None, labels=None):
            return self.model(input_ids=input_ids, labels=labels)      # does not pass the mask on

**Repaired**

    return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

**What is not reported.** The rule ignores a mask of ones. It also ignores a mask that hides only positions without an effect (padding at
the end of a causal model's rows).

**How safe is the fix?** The fix is safe: you edit the code, and the model then uses the whole batch.

**Seen in** huggingface/transformers #808; TransformerLensOrg/TransformerLens #1607.
"""

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, reach_of

_PICTURES = ("pixel", "features", "audio", "image")


def find(trace: Trace) -> Findings:
    reach = reach_of(trace)
    for unused in reach.unused:
        if unused.kind in ("picture", "input"):
            cause = f"with other values of {unused.name}, no bit of the logits changes"
            yield _finding(unused.name, unused.kind == "picture", cause, reach.measured)
    for name in trace.without_effect if reach.undecided else ():
        picture = any(word in name for word in _PICTURES)
        if picture or name == "attention_mask":
            cause = f"no chain of operators leads from {name} to the loss"
            yield _finding(name, picture, cause, f"by structure alone: {reach.undecided[0]}")


def _finding(name: str, picture: bool, cause: str, note: str) -> Finding:
    how = f"pass {name} on to the module that uses it"
    if picture:
        how += ", and insert its placeholder tokens into the row"
    message = f"{name} reaches no prediction"
    fixes = (advice(name, how),)
    return Finding("error" if picture else "warning", message, cause=cause, notes=(note,), fixes=fixes)
