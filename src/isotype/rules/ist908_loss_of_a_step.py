"""
**What it means.** A trainer passes the number of labels of all micro-batches of a step to the model
(`num_items_in_batch`) and does not divide the loss by the number of micro-batches itself, but the model's
loss ignores the number.

**Why it happens.** transformers' Trainer inspects the model's forward: if it takes `**kwargs`, it is assumed
to divide by `num_items_in_batch`. With a custom forward that ignores them, a custom loss function or a
wrapper around a model, the loss stays the mean of each micro-batch, and the gradients of a step are the sum
of all of them.

**Why it is bad.** Gradients are too large by the number of micro-batches per step (clipping hides it, Adam
almost, weight decay and the displayed loss do not), and rows with few labels count as much as rows with many.

**An example that fails**

    class Mine(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):           # num_items_in_batch ends in kwargs
            logits = super().forward(input_ids).logits
            return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}

**Repaired**

    return {"loss": self.loss_function(logits, labels, self.config.vocab_size, **kwargs), "logits": logits}
    # or: trainer.model_accepts_loss_kwargs = False, and the trainer divides by the number of micro-batches

**How safe is the fix?** It changes the size of the gradients to that without accumulation.

**Seen in** huggingface/trl #2604, #5710; huggingface/transformers #34191.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.reach import measured_on
from isotype.rules.kit.words import advice

TITLE = "A loss that ignores the number of labels in a step"
KIND = "wiring"


def find(trace: Trace) -> Iterator[Finding]:
    """Yield a finding if `num_items_in_batch` is passed and changes no loss."""
    reach = trace.reach
    for each in () if reach is None else reach.unused:
        if reach is not None and each.kind == "count":
            accumulates = trace.setup.accumulates > 1
            yield Finding(
                "IST908",
                "error" if accumulates else "note",
                "the loss ignores the number of labels in the step"
                + (": its gradients grow with the micro-batches" if accumulates else ""),
                cause="num_items_in_batch is given, and twice as many change no digit of the loss",
                notes=(measured_on(reach),),
                fixes=(
                    advice(
                        "num_items_in_batch",
                        "divide the sum of the losses by num_items_in_batch, or set trainer.model_accepts_loss_kwargs = False",
                    ),
                ),
            )
