"""Packed sequences that attend to each other

**What it means.** Several sequences are packed into one row and attend to each other. Predictions then depend on the tokens of other
sequences.

**Why it happens.** Packing needs a mask that separates the sequences. The model builds this mask from one of its inputs: `position_ids`,
`cu_seq_lens_q`, `seq_idx`, or a mask with a number for each sequence. transformers builds the mask from `position_ids` only if the batch
has no `attention_mask`. With an `attention_mask` of ones, each sequence attends to the sequences before it. State-space, linear-attention
and convolution layers can separate sequences only by `seq_idx`, but many ignore it.

**An example that fails**

    batch = {"input_ids": packed, "position_ids": positions, "attention_mask": torch.ones_like(packed), "labels": labels}
    model(**batch).loss.backward()                            # trains; every sequence attends to those before it

**Repaired**

    batch.pop("attention_mask")                               # transformers builds the mask of each sequence from position_ids

**What is not reported.** The rule ignores rows whose inputs do not mark sequence boundaries. Such rows are common: they contain several
texts, with only an end-of-text token between two texts.

**How safe is the fix?** The fix is safe: without `attention_mask`, the step computes the same as a batch with one row per sequence. If a
layer cannot separate sequences, train without packing.

**Seen in** huggingface/transformers #46634; inclusionAI/AReaL #1442; axolotl-ai-cloud/axolotl #3796; modelscope/ms-swift #4439.
"""

from isotype.records.finding import Action, Fix
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_of_leak, reach_of


def find(trace: Trace) -> Findings:
    reach = reach_of(trace)
    leak = reach.leak("packed row")
    if leak is None:
        return
    if leak.without:
        whole = f"{leak.where} attends to the whole row"
        cause = f"the batch has {leak.without} as well as position_ids, so {whole}"
        order = f"remove {leak.without} from the batch"
        action = Action("advice", leak.without, order)
        outcome = "each sequence then attends only to itself"
        fix = Fix(order, "safe", verified=True, actions=(action,), outcome=outcome)
    else:
        cause = f"{leak.where} does not separate the sequences of a row"
        how = "train without packing, or with an attention implementation and a model that separate packed sequences"
        fix = advice("packing", how)
    message = "the sequences of a packed row attend to each other"
    yield finding_of_leak(reach, leak, "error", message, cause, fix)
