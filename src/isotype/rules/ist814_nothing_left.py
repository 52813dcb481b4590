"""A softmax or a mean over no values

**What it means.** The result of an operator is NaN for all values of the weights. For example, a mask hides every position of a row of a
softmax, or a mean is computed over no values (`losses[mask].mean()`). A mean loss is also NaN if no label of the batch counts. If no label
counts in a sum, the loss and all gradients are 0, and the finding is a warning.

**Why it happens.** Code fills the scores of hidden positions with `float("-inf")`, and no position of a row is visible. Examples are the
first tokens of a row in a causal model with padding on the left, and a row that contains only padding. All labels are -100 if `max_length`
cuts off every answer, or if the markers of the template do not occur in the text.

**Why it is bad.** The step's loss or all of its gradients are NaN, and the optimizer then makes every weight NaN. A sum over no label
trains nothing.

**An example that fails**

    scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)                        # a row without a single True is NaN

**Repaired**

    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)

**What is not reported.** The rule ignores rows whose NaN is replaced afterwards (`nan_to_num`, `masked_fill`, `where`), and masks that
depend on weights or have more than 16,384 elements. It also ignores `scaled_dot_product_attention`, which returns zeros for such rows.

**How safe is the fix?** The fix is safe: the new fill value changes only rows in which all positions are masked, and `count.clamp(min=1)`
changes only means over no values. If no label counts, you change the data or the mask of the labels.

**Seen in** pytorch/pytorch #103749; bytedance/UniVR #13; huggingface/trl #6671; hiyouga/LlamaFactory #4278.
"""

from isotype.core.names import grouped, plural, short
from isotype.records.finding import Finding
from isotype.records.trace import Call, Trace
from isotype.rules.kit.findings import Findings, advice, finding_at
from isotype.rules.kit.words import op_name, place


def find(trace: Trace) -> Findings:
    """Yield a finding for each line whose result is NaN because all scores of a row, or all labels, are masked."""
    losses = [call for call in trace.calls if "nll_loss" in call.op and call.phase == "forward"]
    labelled = not all(call.undefined for call in losses)  # a loss in parts may have a part without labels
    nothing = (call for call in trace.calls if call.undefined and call.phase == "forward")
    undefined = (call for call in nothing if call.undefined > 0 or not labelled)
    for calls in grouped(undefined, lambda call: (call.op, call.source)).values():
        yield (_labels if "nll_loss" in calls[0].op else _rows)(calls)
    for calls in grouped(_empty_means(trace.calls), lambda call: call.source).values():
        yield _mean(calls)


def _empty_means(calls: tuple[Call, ...]) -> list[Call]:
    """Return the calls that compute a mean of no values, if no later operator of the forward replaces NaN."""
    means: list[Call] = []
    for call in calls:
        name = op_name(call)
        if call.phase == "forward" and name in _CLEARS:
            means = []
        elif call.phase == "forward" and name == "mean" and _has_empty(call) and not _returns_empty(call):
            means.append(call)
        elif call.phase == "backward" and _returns_empty(call):
            return means  # the gradient of an empty selection: the mean belongs to the loss, not to a metric
    return []


_CLEARS = frozenset({"where", "nan_to_num", "nan_to_num_", "masked_fill", "masked_fill_", "nansum"})


def _has_empty(call: Call) -> bool:
    return any(0 in operand.shape for operand in call.operands)


def _returns_empty(call: Call) -> bool:
    return any(0 in shape for _, shape in call.results)


def _mean(calls: list[Call]) -> Finding:
    how = "divide the sum by the number of selected values, or by 1 if there are none (count.clamp(min=1))"
    where = short(calls[0].source) or calls[0].module
    cause = f"the selection at {where} is empty for this batch"
    fixes = (advice(place(calls[0]), how),)
    return finding_at("error", "a mean over no values is NaN", calls, cause=cause, fixes=fixes)


def _rows(calls: list[Call]) -> Finding:
    call, how = calls[0], "fill the mask with torch.finfo(scores.dtype).min instead of -inf"
    where = short(call.source) or call.module
    message = f"no position is visible in {plural(call.undefined, 'row')} of a softmax: the result is NaN"
    cause = f"every score of the row is minus infinity at {where}"
    return finding_at("error", message, calls, cause=cause, fixes=(advice(place(call), how),))


def _labels(calls: list[Call]) -> Finding:
    how = "give every row a label: increase max_length, correct the mask of the answers, or remove the row"
    summed = calls[0].undefined < 0
    result = "the sum is 0 (a mean is NaN), and nothing is trained" if summed else "the mean loss is NaN"
    message = f"no label of the batch counts in the loss: {result}"
    cause = "every label is the ignored index (-100)"
    fixes = (advice("labels", how),)
    return finding_at("warning" if summed else "error", message, calls, cause=cause, fixes=fixes)
