"""An in-place addition to a 16-bit or quantized weight

**What it means.** Code outside of the optimizer adds to a frozen 16-bit weight or buffer, mostly in place. For example, code merges an
adapter into its base weight, updates a running statistic, or updates an average of trained weights.

**Why it is bad.** The sum is rounded to the weight's dtype. If the added value is less than half of the distance between two neighboring
numbers, the weight does not change.

- A merged weight is not exactly base plus adapter, and unmerging does not restore the base. RL trainers merge and unmerge before each
  rollout. In bfloat16, one merge and unmerge changes a base weight by about 1 %. A thousand repetitions change it by two thirds.
- A merge into 4-bit weights quantizes the sum. Most of a small update is lost, so the rollout runs almost without the adapter; and the
  merges and unmerges of a training destroy the base. In nf4, with an adapter of 1 % of the weight's norm, a merge applies 2 % of the
  adapter, and 31 merges and unmerges change the weight by 19 %.
- At each step, a moving average with decay 0.999 adds a thousandth of the difference between the trained weight and the average. In 16
  bits, such a small addition never changes the average. A counter in bfloat16 stops at 256.
- With `target_parameters` (used for experts), PEFT adds the adapter to the weight in each forward, in the weight's dtype. The rounding
  loses the small first updates of a training. The forward is also slow, because PEFT multiplies B by A for every expert, even for experts
  that get no tokens.

**Why it happens.** The base model is loaded in 16 bits for the training, and the merge uses the same dtype. A moving average begins as a
copy of a 16-bit model. `model.to(bfloat16)` casts buffers too.

**An example that costs**

    model.merge_adapter(); generate(model); model.unmerge_adapter()      # before each rollout

    average.mul_(decay).add_(parameter, alpha=1 - decay)                 # all in bfloat16

**Repaired**

    isotype merge …                              # a merge: adds in float32, rounds once, reports the rounding error
    average = copy.deepcopy(model).float()       # averages and statistics: stay in float32
    isotype.fuse(model)                          # experts: applies adapters to activations, not to weights

**What is not reported.** The rule ignores updates by the optimizer (IST801), sums that are not stored in a weight or buffer, and sums in
float32.

**How safe is the fix?** The fixes are safe: a cast of an average to float32 keeps every value, `isotype merge` writes a new checkpoint, and
`isotype.fuse` changes no weight. If weights were already rounded, load them from the checkpoint again.

**Seen in** huggingface/peft #1388, #2321, #2501; huggingface/trl #6688; modelscope/ms-swift #10154;
d8ahazard/sd_dreambooth_extension #1415; konpatp/diffae #16; AndreasBergmeister/ram #6.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import grouped, short, starred
from isotype.core.operators import ADDS_IN_PLACE
from isotype.records.finding import Finding, Fix
from isotype.records.trace import COPY_OF_WEIGHT, MERGED_WEIGHT, Call, Trace, Weight
from isotype.rules.kit.costs import flops_share
from isotype.rules.kit.findings import Findings, Fixes, actions, advice, finding_at, finding_of
from isotype.rules.kit.weight_sets import casts, count, names, spacing

_LOST = "an update below half of a rounding step is lost"
_MEASURED = "measured in nf4, with an adapter of 1 % of the weight's norm: a merge applies 2 % of the adapter, and 31 merges and unmerges change the weight by 19 %"
_PEFT = "peft/tuners/lora/"
_FORMED = "aten.baddbmm.default"
"""PEFT 0.21 calls this operator to add an adapter to the stacked weights of experts (`_LoraFactorsProxy`)."""
_HEADLINES = {
    "merge": ("adapters are merged into {}", "weight", "weights"),
    "delta": ("adapters are multiplied out (B times A) and added to {}", "stacked weight", "stacked weights"),
    "average": ("trained weights are averaged in {}", "copy", "copies"),
    "every": ("adapters are added to {} in every forward", "weight", "weights"),
    "other": ("{} changed in place outside of the optimizer", "tensor is", "tensors are"),
}
"""For each kind of addition: the message, the noun for one changed tensor, and the noun for several tensors."""


def find(trace: Trace) -> Findings:
    quantized = [call for call in trace.calls if _quantizes(call)]
    if quantized:
        yield _requantized(quantized[0])
    updates = [(_kind(call, trace), call) for call in trace.calls]
    for kind, (headline, singular, plural) in _HEADLINES.items():
        calls = [call for of_kind, call in updates if of_kind == kind]
        pairs = ((weight, call) for call in calls for weight in _targets(call, trace))
        firsts = [group[0] for group in grouped(pairs, lambda pair: pair[0].name).values()]
        if not firsts:
            continue
        weights = [weight for weight, _ in firsts]
        number, dtype = count(weights), dtype_name(weights[0].dtype)
        tensors = f"a {dtype} {singular}" if number == 1 else f"{number} {dtype} {plural}"
        message = f"{headline.format(tensors)}: {_LOST}"
        fixes = _FIXES.get(kind) or _float32([w for w in weights if w.name in trace.owners])
        notes = [_share(trace)] if kind == "delta" else []
        yield _finding(message, weights, firsts[0][1], fixes, notes)


def _kind(call: Call, trace: Trace) -> str:
    """Return the key in `_HEADLINES` for a call that adds to a weight in place; "" for other calls."""
    if call.op == _FORMED and call.phase == "forward" and _PEFT in call.source:
        return "delta"
    if call.phase not in ("forward", "generate") or call.recomputed or _quantizes(call):
        return ""
    if call.operands and call.operands[0].origin.name == MERGED_WEIGHT:
        return "merge"
    if not ADDS_IN_PLACE.match(call.op):
        return "average" if any(o.origin.name == COPY_OF_WEIGHT for o in call.operands) else ""
    added = (operand for operand in call.operands if not operand.role.startswith("self"))
    owners = (trace.owners.get(step.name) for operand in added for step in operand.origin.path())
    if any(owner is not None and owner.adapter for owner in owners):
        return "merge"
    return "every" if "peft/tuners/" in call.source else "other"


def _quantizes(call: Call) -> bool:
    merged = bool(call.operands) and call.operands[0].origin.name == MERGED_WEIGHT
    return merged and call.op.startswith("bitsandbytes.")


def _requantized(call: Call) -> Finding:
    bits = "4-bit" if "4bit" in call.op else "int8"
    return finding_at(
        "warning",
        f"adapters are merged into {bits} weights: most of a small update is lost",
        [call],
        cause=f"at {short(call.source)}, PEFT adds the adapter to the dequantized weight, and quantizes the sum",
        notes=(_MEASURED,) if bits == "4-bit" else (),
        fixes=_FIXES["merge"],
    )


def _share(trace: Trace) -> str:
    stacks = (c for c in trace.calls if c.results and len(c.results[0][1]) == 3)
    of_deltas = (c for c in stacks if _PEFT in c.source or (c.phase == "backward" and "_grouped_mm" in c.op))
    return f"the deltas of all experts and their gradients take {100 * flops_share(trace, of_deltas):.0f} % of the step's FLOPs"


def _targets(call: Call, trace: Trace) -> Iterator[Weight]:
    for operand in call.operands:
        if not operand.role.startswith("self") or operand.dtype not in HALVES:
            continue
        origin = operand.origin
        weight = trace.owners.get(origin.name) if origin.kind in ("parameter", "buffer") else None
        # A value that was computed from a weight has the same origin, but rarely the same shape.
        if weight is not None and not weight.trainable and weight.shape == operand.shape:
            yield weight
        elif origin.name in (COPY_OF_WEIGHT, MERGED_WEIGHT):
            yield Weight(origin.name, operand.dtype, operand.shape)


def _finding(
    message: str, weights: Sequence[Weight], call: Call, fixes: Iterable[Fix], notes: list[str]
) -> Finding:
    dtype = weights[0].dtype
    # Between two powers of two, the spacing is constant. Half of it is 1 / (2 * share) to 1 / share of the value.
    share = int(spacing(1.0, dtype) ** -1) * 2
    in_place = "in-place " * bool(ADDS_IN_PLACE.match(call.op))
    lost = f"{dtype_name(dtype)} loses every update below 1/{2 * share} of the weight's value, and below 1/{share} for values just above a power of two"
    return finding_of(
        "warning",
        message,
        weights,
        op=call.op,
        phase=call.phase,
        source=call.source,
        cause=f"{weights[0].name} is {dtype_name(dtype)}, so the {in_place}addition at {short(call.source)} rounds its result",
        notes=(lost, *notes),
        fixes=tuple(fixes),
    )


_MERGE = "merge a float32 copy of the weights and round once (isotype merge), or keep the adapter separate"
_UNMERGE = "after a temporary merge, restore the weights from a saved copy, because unmerging rounds the weights again"
_FIXES = {
    "delta": (advice("experts", "let the adapters act on activations: isotype.fuse(model)"),),
    "merge": (advice("merge", _MERGE), advice("unmerge", _UNMERGE)),
}


def _float32(weights: list[Weight]) -> Fixes:
    if weights:
        plain = [weight for weight in weights if not weight.buffer]
        buffers = names(weight for weight in weights if weight.buffer)
        what = starred(weights[0].name) + (" and others" if len(weights) > 1 else "")
        to_float32 = (*casts(plain, torch.float32), *actions("buffer", buffers, "float32"))
        yield Fix(f"keep {what} in float32", "safe", actions=to_float32)
    how = "keep running sums and averages in float32, and cast their values where they are used"
    yield advice("averages", how)
