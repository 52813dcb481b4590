"""float16 training without loss scaling

**What it means.** The backward runs in float16 without loss scaling. The smallest number of float16 is 6e-8, so smaller gradients become
zero.

**Why it is bad.** Small gradients are lost without a warning. If the trained weights are float16 as well, Adam's epsilon of 1e-8 becomes
zero. A weight with a zero gradient then gets the update 0 / 0 = NaN, for example the rows of an embedding that the batch does not use. Such
a NaN makes the finding an error. Fused Adam divides in float32, so it returns no NaN.

**An example that fails**

    model = model.half()
    loss = model(**batch).loss
    loss.backward(); torch.optim.AdamW(model.parameters()).step()      # NaN

**Repaired**

    model.float(); scaler = torch.amp.GradScaler()     # a GradScaler needs float32 parameters (IST301)
    with torch.autocast("cuda", dtype=torch.float16):  # the matmuls stay in float16
        loss = model(**batch).loss
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

**How safe is the fix?** The fix is safe: a GradScaler multiplies the loss by a power of two, and later divides the gradients by the same
number. Neither rounds. A cast of the parameters to float32 keeps every value.

**Seen in** google/gemma_pytorch #24; Lightning-AI/lit-llama #230; koda-dernet/Side-Step #39; huggingface/sentence-transformers #3233;
afiaka87/glide-finetune #5; matanbt/TROPT #8.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from isotype.core.dtypes import HALVES, parse_dtype
from isotype.records.finding import Action, Fix
from isotype.records.trace import Trace, Weight
from isotype.rules import ist404_compute_dtype
from isotype.rules.kit.findings import Findings, Fixes, finding_of
from isotype.rules.kit.value_ranges import flushed
from isotype.rules.kit.weight_sets import counted, float32_masters, trained


def find(trace: Trace) -> Findings:
    setup = trace.setup
    weights = trained(trace)
    if setup.scaler or "backward" not in setup.phases or not weights:
        return
    notes: list[str] = []
    half, cause, unused = trained(trace, torch.float16), "", None
    if half:
        message = f"{counted(half, 'float16 parameter', 'are')} trained without loss scaling"
        spoiled = [weight for weight in half if weight.name in trace.spoiled]
        if spoiled:
            unused = spoiled[0]
            amount = counted(spoiled, "parameter")
            message += f": the first update makes values of {amount} NaN or infinite"
            notes.append("Adam's epsilon of 1e-8 and the squares of small gradients become zero in float16")
        elif epsilon := _zero_epsilon(trace):
            notes.append(
                f"Adam's epsilon of {epsilon:g} is zero in float16, so a zero gradient becomes 0 / 0"
            )
            unused = next(_unused_rows(trace, half), None)
            if unused is not None:
                message += f": the first update turns rows of {unused.name} into NaN"
                rows = f"{unused.name} has more rows than the batch has tokens"
                notes.append(f"{rows}: unused rows have zero gradients")
    elif _backward_in_float16(trace):
        message = "the backward runs in float16 without loss scaling: gradients below 6e-8 become zero"
        how = "autocast to float16" if setup.autocast == torch.float16 else "float16 compute"
        cause = f"{how}, and no GradScaler scales the loss"
    else:
        return
    yield finding_of(
        "warning" if unused is None else "error",
        message,
        sorted(half or weights, key=lambda weight: weight is not unused),
        cause=cause,
        phase="backward",
        notes=(*notes, *_measured(trace)),
        fixes=tuple(_fixes(trace)),
    )


def _zero_epsilon(trace: Trace) -> float:
    """Return the positive epsilon that an optimizer adds in float16, where it becomes zero; 0.0 if there is none.

    A fused kernel adds the epsilon in float32, where the epsilon does not become zero.
    """
    sums = (c for c in trace.calls if c.phase == "optimizer" and ".add_." in c.op.replace("_foreach_", ""))
    added = (number for c in sums if c.operands[0].dtype == torch.float16 for _, number in c.numbers)
    return next((number for number in added if torch.tensor(number, dtype=torch.float16) == 0 < number), 0.0)


def _unused_rows(trace: Trace, half: Sequence[Weight]) -> Iterator[Weight]:
    """Yield the embeddings that have more rows than the batch has tokens, except embeddings that are tied to a head."""
    for call in trace.calls:
        if call.op == "aten.embedding.default" and call.phase == "forward":
            table, tokens = call.operands[:2]
            if table.shape[0] > math.prod(tokens.shape):
                yield from (w for w in half if w.name == table.origin.name and not w.tied)


def _measured(trace: Trace) -> Iterator[str]:
    if shares := flushed(trace):
        plain, scaled = f"{100 * shares.plain:.0f} %", f"{100 * shares.scaled:.0f} %"
        yield f"measured: {plain} of the gradient values become zero without loss scaling, and {scaled} at a loss scale of 65536"


def _fixes(trace: Trace) -> Fixes:
    """Yield fixes that add a GradScaler. If the trainable parameters have 16 bits, the fixes also cast them to float32."""
    compute = trace.setup.autocast or trace.setup.compute
    scale = Action("setting", "scaler", "True")
    low = trained(trace, *HALVES)
    if not low:
        yield Fix("scale the loss with a GradScaler", "safe", actions=(scale,))
        return
    for fix in float32_masters(trace, low):
        cast = next((parse_dtype(act.value) for act in fix.actions if act.kind == "setting"), compute)
        if cast != compute:
            continue  # autocast to the masters' former dtype, not to the model's
        if compute == torch.float16:
            text = f"{fix.description}, with a GradScaler"
            fix = replace(fix, description=text, actions=(*fix.actions, scale))
        yield fix


def _backward_in_float16(trace: Trace) -> bool:
    """Return True if the backward has a float16 matmul outside of the 4-bit layers that IST404 reports."""
    other = ist404_compute_dtype.layers_in(trace, torch.float16)
    backward = (call for call in trace.calls if call.phase == "backward" and call.module not in other)
    return any(call.run_dtype == torch.float16 for call in backward)
