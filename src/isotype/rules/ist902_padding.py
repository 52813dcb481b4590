"""Padding that changes predictions

**What it means.** Predictions depend on the ids of padding tokens, or on their number.

**Why it happens.** The collator creates no `attention_mask`, or a wrapper does not pass the mask on. In other cases, a part of the model
ignores the mask (a convolution, a recurrent layer, a vision tower). A causal model does not attend to padding on the right, but without a
mask it attends to padding on the left. In a model with learned positions, padding on the left also shifts the positions of the tokens,
unless the batch has `position_ids`.

**An example that fails**

    tokenizer.padding_side = "left"
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    model(input_ids=batch["input_ids"], labels=labels)        # without the mask every token attends to the padding

**Repaired**

    model(**batch, labels=labels)                             # or padding_side = "right" for a causal model

**How safe is the fix?** The three fixes (a mask, `position_ids`, padding on the right) are safe: each gives a row the same predictions as
without padding.

**Seen in** huggingface/transformers #33095, #29583; huggingface/trl #469; tloen/alpaca-lora #315; TransformerLensOrg/TransformerLens #1609.
"""

from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_of_leak, reach_of


def find(trace: Trace) -> Findings:
    reach = reach_of(trace)
    if any(unused.name == "attention_mask" for unused in reach.unused):
        return  # the mask changes no prediction at all: IST905 reports it
    read, moved = reach.leak("padding"), reach.leak("padding position")
    if read is not None:
        if "attention_mask" in trace.setup.batch:
            cause = f"{read.where} ignores the attention mask"
            how = "mask the padding in this module, or pad on the right"
        else:
            cause = "the batch has padding and no attention mask"
            how = "pass the attention mask to the model"
        fix = advice("attention_mask", how)
        yield finding_of_leak(reach, read, "error", "the model treats padding as text", cause, fix)
    if moved is not None:
        message = "padding on the left shifts the positions of a row's tokens"
        cause = "positions are counted from the first padding token"
        how = "pass position_ids that count from each row's first token, or pad on the right"
        fix = advice("position_ids", how)
        yield finding_of_leak(reach, moved, "warning", message, cause, fix)
