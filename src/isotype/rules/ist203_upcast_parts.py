"""
**What it means.** Embeddings, the head, norms or other frozen weights that are not quantized are float32,
while most of the model is in 16 bits or in a quantization format.

**Why it is bad.** They take twice the memory they need: for a vocabulary of 128,256 and a hidden size of
4,096, embedding and head take 2.1 GB more. Their float32 results promote the residual stream, so that every
layer casts its input and attention runs in float32 unless autocast is on.

**Why it happens.** `prepare_model_for_kbit_training` of PEFT, which trainers call for quantized models, casts
every parameter to float32 that is not quantized.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=nf4, dtype=torch.bfloat16)
    model = prepare_model_for_kbit_training(model)

**Repaired**

    isotype.enforce(model, policy)            # or: isotype.repair(model, isotype.check(model, batch))
    model.gradient_checkpointing_enable(); model.enable_input_require_grads()   # what else it did

**What is not reported.** Pinned weights, adapters, buffers; less than 1 % of the memory of all weights.
Trainable weights are float32 masters, which small updates need: they get a note on their cost. Extra memory:
sum over these weights of elements x (4 - 2) bytes.

**How safe is the fix?** If the weights came from a 16-bit checkpoint, every value is cast back without loss:
safe. Otherwise, or if the values are not available, it is offered as unsafe.

**Seen in** huggingface/peft #3265; bitsandbytes #1515, #1569; axolotl #2621; unslothai/unsloth #1186.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.formats import FOUR_BITS
from isotype.core.names import agree, base_name, format_bytes, listed
from isotype.records.finding import Cost, Finding
from isotype.records.trace import Trace, Weight
from isotype.rules.kit import costs
from isotype.rules.kit.weight_sets import cast_fix, finding_of, names
from isotype.rules.kit.words import advice

TITLE = "Frozen float32 weights in a 16-bit or quantized model"

_LEAST_SHARE = 0.01


def find(trace: Trace) -> Iterator[Finding]:
    """Yield frozen float32 weights beside narrower ones."""
    base = [w for w in trace.weights if not (w.buffer or w.adapter)]
    narrow = [w for w in base if not w.trainable and (w.quantization is not None or w.dtype in costs.HALVES)]
    wide = [
        w for w in base if w.dtype == torch.float32 and w.quantization is None and not _wanted_wide(trace, w)
    ]
    wanted = _wanted(trace, narrow)
    if wanted is None or not wide or _elements(wide) > _elements(narrow):
        return
    for trainable in (False, True):
        part = sorted((w for w in wide if w.trainable == trainable), key=lambda w: -w.bytes * w.repeats)
        extra = sum(w.repeats * costs.elements(w.shape) * (4 - wanted.itemsize) for w in part)
        if extra >= _LEAST_SHARE * sum(w.bytes * w.repeats for w in base):
            yield _masters(part, wanted, extra) if trainable else _finding(trace, part, wanted, extra)


def _wanted_wide(trace: Trace, weight: Weight) -> bool:
    """Return whether a weight is float32 on purpose: pinned, or because of its module's value range."""
    return weight.pinned or base_name(weight.module) in trace.by_ranges


def _wanted(trace: Trace, narrow: Sequence[Weight]) -> torch.dtype | None:
    """Return the model's 16-bit dtype: that of most plain weights, else the policy's, else the compute dtype."""
    policy = trace.setup.policy
    if policy is not None:
        return policy.plain if policy.plain in costs.HALVES else None
    plain = max(
        (w for w in narrow if w.quantization is None), key=lambda w: w.bytes * w.repeats, default=None
    )
    dtype = plain.dtype if plain is not None else trace.setup.compute
    return dtype if dtype in costs.HALVES else None


def _elements(weights: Sequence[Weight]) -> int:
    """Return the number of elements as if dense: a packed byte holds two of 4 bits."""
    total = 0
    for weight in weights:
        packed = weight.quantization is not None and weight.quantization.format in FOUR_BITS
        count = costs.elements(weight.shape)
        total += weight.repeats * (2 * weight.dtype.itemsize * count if packed else count)
    return total


def _finding(trace: Trace, wide: Sequence[Weight], wanted: torch.dtype, extra: int) -> Finding:
    target = dtype_name(wanted)
    touched = {weight.module for weight in wide}
    bound = [
        c for c in costs.casts(trace) if c.call.module in touched and c.operand.origin.kind == "parameter"
    ]
    cost = Cost(cast_bytes=sum(cast.bytes for cast in bound), memory_bytes=extra)
    to_target = cast_fix(f"cast them to {target}", wide, wanted)
    rounds = f"a cast to {target} may round some of their values"
    return finding_of(
        "IST203",
        "warning",
        f"{agree(len(wide), 'frozen weight', 'are')} float32 in a {target} model: {format_bytes(extra)} more memory",
        wide,
        phase="load",
        notes=(f"float32: {listed(names(wide))}", *(() if to_target.safety == "safe" else (rounds,))),
        fixes=(
            to_target,
            advice(
                "isotype.enforce",
                "leave out prepare_model_for_kbit_training, or call isotype.enforce(model, policy) after it",
                "model, policy",
            ),
        ),
        cost=cost,
    )


def _masters(wide: Sequence[Weight], wanted: torch.dtype, extra: int) -> Finding:
    narrow = dtype_name(wanted)
    return finding_of(
        "IST203",
        "note",
        f"{agree(len(wide), 'trained weight', 'are')} float32 in a {narrow} model: {format_bytes(extra)} more memory",
        wide,
        phase="load",
        notes=(f"small updates need float32; with LoRA the frozen weights could be {narrow}",),
        cost=Cost(memory_bytes=extra),
    )
