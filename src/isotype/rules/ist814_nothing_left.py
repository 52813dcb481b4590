"""
**What it means.** The result is NaN whatever the weights are: a mask hides every position of a row of a softmax, or no
label of the batch counts in the loss, so that its mean is 0 / 0.

**Why it happens.** Code fills scores with `float("-inf")`. With padding on the left, the first tokens of a causal row
may attend to nothing; a row of padding alone attends to nothing either. Labels are all -100 if `max_length` cuts off
every answer, or if the template's markers are not found in the text.

**Why it is bad.** The loss, or every gradient, of the step is NaN, and after the optimizer's step every weight.

**An example that fails**

    scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)                        # a row without a single True is NaN

**Repaired**

    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)

**What is not reported.** Rows whose NaN is replaced afterwards (`nan_to_num`, `masked_fill`, `where`); masks that depend
on weights or have more than 16,384 elements; `scaled_dot_product_attention`, which returns zeros for such rows.

**How safe is the fix?** Safe: only rows without a single visible position change.

**Seen in** pytorch/pytorch #103749; bytedance/UniVR #13; huggingface/trl #6671.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.core.names import grouped, plural, short
from isotype.records.finding import Finding, finding_at
from isotype.records.trace import Call, Trace
from isotype.rules.kit.words import advice

TITLE = "A softmax or a mean over nothing"


def find(trace: Trace) -> Iterator[Finding]:
    """Yield one finding per line whose result is NaN, because a mask or the labels leave nothing to compute with."""
    undefined = (call for call in trace.calls if call.undefined and call.phase == "forward")
    for calls in grouped(undefined, lambda call: (call.op, call.source)).values():
        yield (_labels if "nll_loss" in calls[0].op else _rows)(calls[0], calls)


def _rows(call: Call, calls: list[Call]) -> Finding:
    where = short(call.source) or call.module
    return finding_at(
        "IST814",
        "error",
        f"{plural(call.undefined, 'row')} of a softmax have no position that the mask leaves: the result is NaN",
        call,
        calls,
        cause=f"every score of the row is minus infinity at {where}",
        fixes=(
            advice(
                call.source or call.module, "fill the mask with torch.finfo(scores.dtype).min instead of -inf"
            ),
        ),
    )


def _labels(call: Call, calls: list[Call]) -> Finding:
    how = "leave out rows without labels: raise max_length, or correct the mask of the answers"
    return finding_at(
        "IST814",
        "error",
        "no label of the batch counts in the loss: its mean is NaN",
        call,
        calls,
        cause="every label is the ignored index (-100)",
        fixes=(advice("labels", how),),
    )
