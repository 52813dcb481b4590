"""Labels at wrong tokens

**What it means.** Tokens that should not count in the loss (padding, images) have labels. In other cases, the loss compares each label with
the logits of a wrong position, such as the position two tokens earlier.

**Why it happens.** A collator writes `labels = input_ids.clone()` and does not set the labels of padding to -100. The model then learns to
predict padding, which has most of the labels if rows are short. In other cases, a collator shifts the labels, and the model shifts them
again, as all models of transformers do.

**An example that fails**

    labels = torch.roll(ids, -1, dims=1)                       # labels of the next token
    model(input_ids=ids, labels=labels).loss.backward()        # transformers shifts the labels again

**Repaired**

    labels = ids.masked_fill(attention_mask == 0, -100)        # the model shifts them

**How safe is the fix?** The fix is safe: you edit the labels. The training then has the intended objective.

**Seen in** huggingface/transformers #32944, #44642; LLM360/amber-train #6; GanjinZero/RRHF #49; open-jarvis/OpenJarvis #521.
"""

from isotype.core.names import plural
from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, reach_of

_IGNORED = {
    "padding": ("at padding, where attention_mask is 0", "labels.masked_fill(attention_mask == 0, -100)"),
    "images": ("at image or audio tokens", "labels[labels == image_token_id] = -100"),
}


def find(trace: Trace) -> Findings:
    reach = reach_of(trace)
    labels = reach.labels
    if labels is None:
        return
    if labels.shift not in (None, 0, 1):
        cause = "the labels are already shifted, and the model shifts them again"
        if labels.shift == -1:
            cause = "each prediction is compared with the token before its position"
        fixes = (advice("labels", "pass labels that are not shifted, because the model shifts them"),)
        message = "predictions are compared with wrong tokens"
        notes = (f"{plural(labels.learned, 'prediction')} count in the loss", reach.measured)
        yield Finding("error", message, cause=cause, notes=notes, fixes=fixes)
    counted = {"padding": labels.at_padding, "images": labels.at_pictures}
    for what, (place, how) in _IGNORED.items():
        count = counted[what]
        if count:
            yield Finding(
                "warning",
                f"{plural(count, 'token')} of {what} {'counts' if count == 1 else 'count'} in the loss",
                cause=f"the labels {place} are not -100",
                notes=(reach.measured,),
                fixes=(advice("labels", how),),
            )
