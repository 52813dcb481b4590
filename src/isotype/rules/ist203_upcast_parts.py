"""
**What it means.** Embeddings, the head, norms or other frozen weights that are not quantized lie in float32, while
most of the model lies in 16 bits or in a quantization format.

**Why it is bad.** They take twice the memory they need: for a vocabulary of 128,256 and a hidden size of 4,096, embedding
and head take 2.1 GB more. Their float32 results promote the residual stream, so that every layer casts its input and
attention runs in float32 unless autocast is on.

**Why it happens.** `prepare_model_for_kbit_training` of PEFT, which trainers call for quantized models, casts every
parameter to float32 that is not quantized.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=nf4, dtype=torch.bfloat16)
    model = prepare_model_for_kbit_training(model)

**Repaired**

    isotype.enforce(model, policy)            # or: isotype.repair(model, isotype.check(model, batch))
    model.gradient_checkpointing_enable(); model.enable_input_require_grads()   # what else it did

**What is not reported.** Pinned weights, adapters, buffers; less than 1 % of the memory of all weights. Trainable
weights are float32 masters, which small updates need: for them it is a note of their price. Extra memory: sum over
these weights of elements x (4 - 2) bytes.

**How safe is the fix?** Where the weights came from a 16-bit checkpoint, every value goes back without loss: safe.
Where that is not so, or not known (weights not at hand), it is offered as unsafe.

**Seen in** huggingface/peft #3265; bitsandbytes #1515, #1569; axolotl #2621; unslothai/unsloth #1186.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import agree, starred
from isotype.core.units import format_bytes
from isotype.rules.finding import Finding, Fix, Price
from isotype.rules.kit import prices
from isotype.rules.kit.fixes import actions, advice, safety_of_cast
from isotype.rules.kit.weight_sets import names
from isotype.trace.record import Trace, Weight

TITLE = "Frozen float32 weights in a 16-bit or quantized model"

_LEAST_SHARE = 0.01


def find(trace: Trace) -> Iterator[Finding]:
    """Frozen weights in float32 beside ones that lie narrower."""
    base = [w for w in trace.weights if not (w.buffer or w.adapter)]
    narrow = [w for w in base if not w.trainable and (w.quantization is not None or w.dtype in prices.HALVES)]
    wide = [w for w in base if w.dtype == torch.float32 and w.quantization is None and not w.pinned]
    wanted = _wanted(trace, narrow)
    if wanted is None or not wide or _elements(wide) > _elements(narrow):
        return
    for trainable in (False, True):
        part = [w for w in wide if w.trainable == trainable]
        extra = sum(w.repeats * prices.elements(w.shape) * (4 - wanted.itemsize) for w in part)
        if extra >= _LEAST_SHARE * sum(w.bytes * w.repeats for w in base):
            yield _masters(part, wanted, extra) if trainable else _finding(trace, part, wanted, extra)


def _wanted(trace: Trace, narrow: Sequence[Weight]) -> torch.dtype | None:
    """The 16-bit dtype of the model: that of most plain weights, else of the policy, else what it computes in."""
    policy = trace.setup.policy
    if policy is not None:
        return policy.plain if policy.plain in prices.HALVES else None
    plain = max(
        (w for w in narrow if w.quantization is None), key=lambda w: w.bytes * w.repeats, default=None
    )
    found = plain.dtype if plain is not None else trace.setup.compute
    return found if found in prices.HALVES else None


def _elements(weights: Sequence[Weight]) -> int:
    """Elements as if dense: a packed byte holds two of 4 bits."""
    total = 0
    for weight in weights:
        packed = weight.quantization is not None and weight.quantization.format in ("nf4", "fp4")
        count = prices.elements(weight.shape)
        total += weight.repeats * (2 * weight.dtype.itemsize * count if packed else count)
    return total


def _finding(trace: Trace, wide: Sequence[Weight], wanted: torch.dtype, extra: int) -> Finding:
    largest = max(wide, key=lambda weight: weight.bytes * weight.repeats)
    target = dtype_name(wanted)
    touched = {weight.module for weight in wide}
    bound = [
        c for c in prices.casts(trace) if c.call.module in touched and c.operand.origin.kind == "parameter"
    ]
    safety = safety_of_cast(wide, wanted)
    price = Price(cast_bytes=sum(cast.bytes for cast in bound), memory_bytes=extra)
    shown = ", ".join(
        starred(w.name) for w in sorted(_distinct(wide), key=lambda w: -w.bytes * w.repeats)[:3]
    )
    return Finding(
        code="IST203",
        severity="warning",
        message=f"{agree(len(wide), 'frozen weight', 'are')} float32 in a {target} model: "
        f"{format_bytes(extra)} more memory",
        module=largest.module,
        phase="load",
        cause=f"{largest.name} is float32",
        notes=(
            f"float32: {shown}" + (f" and {len(names(wide)) - 3} more" if len(names(wide)) > 3 else ""),
            *(
                ()
                if safety == "safe"
                else (f"whether {target} holds every value of them is not known or not so",)
            ),
        ),
        fixes=(
            Fix(
                f"cast them to {target}",
                safety,
                actions=actions("parameter", names(wide), target),
            ),
            advice(
                "isotype.enforce",
                "leave out prepare_model_for_kbit_training, or call isotype.enforce(model, policy) after it",
                "model, policy",
            ),
        ),
        price=price,
        places=tuple(dict.fromkeys(weight.module for weight in wide)),
    )


def _masters(wide: Sequence[Weight], wanted: torch.dtype, extra: int) -> Finding:
    largest = max(wide, key=lambda weight: weight.bytes * weight.repeats)
    narrow = dtype_name(wanted)
    return Finding(
        code="IST203",
        severity="note",
        message=f"{agree(len(wide), 'trained weight', 'are')} float32 in a {narrow} model: "
        f"{format_bytes(extra)} more memory",
        module=largest.module,
        phase="load",
        cause=f"{largest.name} is float32",
        notes=(
            f"that is what small updates need; with LoRA on them {narrow} would do for the frozen weights",
        ),
        price=Price(memory_bytes=extra),
        places=tuple(dict.fromkeys(weight.module for weight in wide)),
    )


def _distinct(weights: Sequence[Weight]) -> list[Weight]:
    return list({starred(weight.name): weight for weight in weights}.values())
