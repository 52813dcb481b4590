"""
**What it means.** Sequences packed into one row attend to each other: a prediction in one sequence depends
on the tokens of another one.

**Why it happens.** Packing needs a mask that separates the sequences. The model's own code builds it from the input
that it reads: `position_ids`, `cu_seq_lens_q`, `seq_idx` or numbered masks. transformers reads `position_ids` for
it only without an `attention_mask`. With an `attention_mask` of ones, as most collators and `tokenizer.pad`
create it, positions restart, but attention crosses the borders. State-space,
linear-attention and convolution layers need `seq_idx`, and many do not read it.

**An example that fails**

    batch = {"input_ids": packed, "position_ids": starts_again, "attention_mask": torch.ones_like(packed), "labels": labels}
    model(**batch).loss.backward()                            # trains; every sequence attends to those before it

**Repaired**

    batch.pop("attention_mask")                               # transformers builds the mask of each sequence from position_ids

**What is not reported.** Rows without sequence boundaries: training on concatenated text with end-of-text
tokens between is common.

**How safe is the fix?** Safe: the step then computes the same as one row per sequence. It is verified on the
copy on which the finding was measured.

**Seen in** huggingface/transformers #46634; inclusionAI/AReaL #1442; axolotl-ai-cloud/axolotl #3796;
modelscope/ms-swift #4439.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Action, Finding, Fix
from isotype.records.reach import Leak
from isotype.records.trace import Trace
from isotype.rules.kit.reach import leak_finding, where
from isotype.rules.kit.words import advice

TITLE = "Packed sequences that attend to each other"
KIND = "wiring"


def find(trace: Trace) -> Iterator[Finding]:
    """Yield predictions in a sequence of a packed row that depend on another sequence's tokens."""
    leak = None if trace.reach is None else trace.reach.leak("packed row")
    if trace.reach is not None and leak is not None:
        message = "the sequences of a packed row attend to each other"
        yield leak_finding("IST901", "error", message, trace.reach, leak, *_cause(leak))


def _cause(leak: Leak) -> tuple[str, tuple[Fix, ...]]:
    if leak.without:
        cause = f"{leak.without} is given beside position_ids: {where(leak)} then sees the whole row"
        order = f"leave {leak.without} out of the batch"
        action = Action("advice", leak.without, order)
        outcome = "no sequence then reaches another one"
        return cause, (Fix(order, "safe", verified=True, actions=(action,), outcome=outcome),)
    cause = f"{where(leak)} does not separate the sequences of a row"
    how = "train without packing, or with an attention implementation and a model that separate packed sequences"
    return cause, (advice("packing", how),)
