"""A loss that ignores the number of labels in a step

**What it means.** A trainer counts the labels in all micro-batches of a step, and passes the count to the model as `num_items_in_batch`.
The trainer expects the model to divide the loss by this count, but the model ignores the count.

**Why it happens.** transformers' Trainer inspects the model's forward. If the forward takes `**kwargs`, the Trainer assumes that the model
divides by `num_items_in_batch`. A custom forward, a custom loss function or a wrapper around a model may ignore `num_items_in_batch`. Each
loss is then the mean over one micro-batch, and the Trainer adds up the gradients of all micro-batches without dividing them.

**Why it is bad.** The gradients are multiplied by the number of micro-batches per step. Gradient clipping hides the error, and Adam almost
hides it. However, the displayed loss is wrong, and weight decay has less effect if the optimizer adds it to the gradients. Micro-batches
with few labels count as much as micro-batches with many labels.

**An example that fails**

    class Mine(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):           # num_items_in_batch ends in kwargs
            logits = super().forward(input_ids).logits
            return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}

**Repaired**

    return {"loss": self.loss_function(logits, labels, self.config.vocab_size, **kwargs), "logits": logits}
    # or: trainer.model_accepts_loss_kwargs = False, and the trainer divides by the number of micro-batches

**How safe is the fix?** The fix is safe: it averages the gradients over all labels of the step. If you set
`trainer.model_accepts_loss_kwargs` to False, the Trainer averages the gradients over the micro-batches. Micro-batches with few labels then
still count as much as others.

**Seen in** huggingface/trl #2604, #5710; huggingface/transformers #34191.
"""

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, reach_of


def find(trace: Trace) -> Findings:
    reach = reach_of(trace)
    if not any(unused.kind == "count" for unused in reach.unused):
        return
    accumulates = trace.setup.accumulates > 1
    grow = ": the gradients grow with the number of micro-batches" if accumulates else ""
    how = (
        "divide the sum of the losses by num_items_in_batch, or set trainer.model_accepts_loss_kwargs = False"
    )
    yield Finding(
        "error" if accumulates else "note",
        f"the loss ignores the number of labels in the step{grow}",
        cause="the loss does not change, to the last digit, if num_items_in_batch doubles",
        notes=(reach.measured,),
        fixes=(advice("num_items_in_batch", how),),
    )
