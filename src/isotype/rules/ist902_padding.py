"""
**What it means.** Predictions depend on the ids of padding tokens, or on their number.

**Why it happens.** No `attention_mask` reaches the layer: the collator creates none, a wrapper drops it, a
part of the model ignores it (a convolution, a recurrent layer, a tower). A causal model does not attend to
padding after a row, but to padding before it. A model with learned positions counts padding before a row
unless it gets `position_ids`.

**An example that fails**

    tokenizer.padding_side = "left"
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    model(input_ids=batch["input_ids"], labels=labels)        # without the mask every token attends to the padding

**Repaired**

    model(**batch, labels=labels)                             # or padding_side = "right" for a causal model

**How safe is the fix?** Safe: the mask only hides padding.

**Seen in** huggingface/transformers #33095, #29583; huggingface/trl #469; tloen/alpaca-lora #315;
TransformerLensOrg/TransformerLens #1609.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.reach import leak_finding, where
from isotype.rules.kit.words import advice

TITLE = "Padding that is read"
KIND = "wiring"


def find(trace: Trace) -> Iterator[Finding]:
    """Yield predictions that depend on the padding tokens, or on their number."""
    reach = trace.reach
    if reach is not None and any(each.name == "attention_mask" for each in reach.unused):
        return  # the mask reaches nothing at all: IST905 reports it
    leak = None if reach is None else reach.leak("padding")
    masked = "attention_mask" in trace.setup.batch
    if reach is not None and leak is not None:
        cause = (
            f"{where(leak)} ignores the attention mask"
            if masked
            else "the batch has padding and no attention mask"
        )
        how = (
            "mask the padding in this module, or pad behind the rows"
            if masked
            else "give the model the attention mask"
        )
        fixes = (advice("attention_mask", how),)
        yield leak_finding("IST902", "error", "padding is read as text", reach, leak, cause, fixes)
    leak = None if reach is None else reach.leak("padding position")
    if reach is not None and leak is not None:
        cause = "positions are counted from the first padding token"
        how = "give position_ids that count from each row's first token, or pad behind the rows"
        message = "padding in front of a row moves its positions"
        yield leak_finding("IST902", "warning", message, reach, leak, cause, (advice("position_ids", how),))
