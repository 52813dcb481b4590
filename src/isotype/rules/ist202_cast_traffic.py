"""Weights or adapter inputs that are cast again at every step

**What it means.** The step casts the same tensors every time. For example, autocast casts frozen float32 weights to 16 bits at each matmul.
In other cases, PEFT casts the input of a LoRA layer to float32, and autocast casts the same input back to 16 bits.

**Why it is bad.** A cast reads and writes every element, but computes nothing. Autocast keeps the casts of trainable weights for the whole
step. However, autocast casts frozen weights at every use, and once more when gradient checkpointing recomputes their layer. The float32
weights take twice the memory, but the matmuls never use their additional digits.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(**batch)                       # a cast reads 4 bytes and writes 2 bytes for each parameter

**Repaired**

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with peft.helpers.disable_input_dtype_casting(model):      # no cast of the adapters' inputs under autocast

**What is not reported.** The rule ignores casts of trainable weights, and casts of weights that the model's author keeps in float32
(`_keep_in_fp32_modules`). It also ignores casts that move less than 2 % of all bytes that the step reads and writes.

**How safe is the fix?** Storing frozen weights in 16 bits is safe if the 16-bit dtype represents every value. `disable_input_dtype_casting`
is always safe, because autocast casts the inputs in any case. Storing frozen weights in 16 bits is unsafe if this rounds values. The
matmuls then get the same 16-bit values as before, but a merged or saved model loses the float32 digits.

**Seen in** huggingface/peft #1172; AgileRL #623.
"""

import math
from collections.abc import Iterator, Sequence

from isotype.core.dtypes import dtype_name
from isotype.core.names import format_bytes, plural, short
from isotype.records.finding import Cost, Finding
from isotype.records.trace import Trace, Weight
from isotype.rules.kit import costs
from isotype.rules.kit.findings import Findings, advice, finding_at
from isotype.rules.kit.weight_sets import cast_fix, extra_bytes, is_frozen_base
from isotype.rules.kit.words import cause_text

_LEAST_SHARE = 0.02


def find(trace: Trace) -> Findings:
    weights = [cast for cast in costs.casts(trace) if _of_frozen_weight(cast, trace)]
    if _notable(weights, trace):
        yield _weights_finding(trace, weights)
    undone = list(_undone(trace))
    if _notable([cast for cast, _ in undone], trace):
        yield _adapters_finding(trace, undone)


def _notable(casts: Sequence[costs.Cast], trace: Trace) -> bool:
    return sum(cast.bytes for cast in casts) > _LEAST_SHARE * costs.all_bytes(trace)


def _of_frozen_weight(cast: costs.Cast, trace: Trace) -> bool:
    """Return True if a whole frozen weight is cast to a narrower compute dtype."""
    origin = cast.operand.origin
    weight = trace.owners.get(origin.name) if origin.kind == "parameter" else None
    if weight is None or not is_frozen_base(weight):
        return False
    whole = math.prod(cast.operand.shape) == math.prod(weight.shape)
    return whole and not cast.widens and cast.after == trace.setup.compute


def _weights_finding(trace: Trace, casts: Sequence[costs.Cast]) -> Finding:
    first = casts[0]
    before, after = dtype_name(first.before), dtype_name(first.after)
    # The fix casts all frozen weights. Embeddings left in float32 would promote the results of the others.
    frozen = [weight for weight in trace.weights if is_frozen_base(weight) and weight.dtype == first.before]
    cast_weights = (trace.owners[cast.operand.origin.name] for cast in casts)
    weights = {weight.name: weight for weight in cast_weights}.values()
    spare = extra_bytes(weights, first.after)
    moved = sum(cast.bytes for cast in casts)
    calls = [cast.call for cast in casts]
    cost = Cost(cast_bytes=moved, memory_bytes=spare, slowdown=costs.slowdown(trace, (), first.after, calls))
    message = f"frozen {before} weights are cast to {after} at every step: {format_bytes(moved)}"
    cause = cause_text(first.operand.origin, trace.owners)
    more = f"{plural(len(weights), 'weight')}, {format_bytes(spare)} more memory than in {after}"
    notes = (more, *costs.estimate(cost, trace))
    fixes = (
        cast_fix(f"store the frozen weights in {after}", frozen, first.after),
        advice("dtype", f"load the model with dtype={after}", after),
    )
    return finding_at("warning", message, calls, cause=cause, notes=notes, fixes=fixes, cost=cost)


def _undone(trace: Trace) -> Iterator[tuple[costs.Cast, Weight]]:
    """Yield (cast, adapter weight) if a layer casts its input to a wider dtype, and its adapter casts it back."""
    adapters = {weight.module: weight for weight in trace.weights if weight.adapter}
    for cast in costs.casts(trace):
        up, weight = cast.operand.origin, adapters.get(cast.call.module)
        if weight is None or cast.widens or up.kind != "cast" or up.before is None:
            continue
        if up.before.dtype == cast.after and weight.module.startswith(f"{up.module}."):
            yield cast, weight


def _adapters_finding(trace: Trace, undone: Sequence[tuple[costs.Cast, Weight]]) -> Finding:
    first, weight = undone[0]
    wide, narrow = dtype_name(first.before), dtype_name(first.after)
    up = first.operand.origin
    # The cast up and the cast down have the same two dtypes.
    both = [cast for cast, _ in undone for _ in (0, 1)]
    moved = sum(cast.bytes for cast in both)
    slowdown = costs.slowdown(trace, (), first.after, [cast.call for cast in both])
    cost = Cost(cast_bytes=moved, slowdown=slowdown)
    number = sum(cast.call.repeats for cast, _ in undone)
    how = "run the step in `with peft.helpers.disable_input_dtype_casting(model):`, because autocast casts the inputs anyway"
    return finding_at(
        "note",
        f"PEFT casts adapter inputs to {wide}, and autocast casts them back to {narrow}: {format_bytes(moved)}",
        [first.call],
        module=up.module,
        source=up.source,
        cause=f"{weight.name} is {wide}, so its layer casts the adapter's input to {wide} at {short(up.source)}",
        notes=(
            f"{number} casts to {wide} in a step, and the same number of casts back",
            *costs.estimate(cost, trace),
        ),
        fixes=(advice("cast_input_dtype_enabled", how, "False"),),
        cost=cost,
        places=tuple(dict.fromkeys(cast.operand.origin.module for cast, _ in undone)),
    )
