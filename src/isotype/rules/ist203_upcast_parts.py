"""Frozen weights in a wider dtype than the rest of the model

**What it means.** Most of the model is in 16 bits or quantized, but some frozen weights are float32, such as embeddings, the head or norms.
Or a quantized model has stacked experts (one parameter for all experts of a layer) that are not quantized.

**Why it is bad.** Float32 weights take twice the memory of 16-bit weights. With a vocabulary of 128,256 and a hidden size of 4,096, a
float32 embedding and a float32 head together take 2.1 GB more than in 16 bits. Float32 weights also make the hidden states float32, so every layer casts
its input. Without autocast, attention runs in float32.

In a mixture of experts, most weights are experts: a model of 26B parameters that is loaded with `load_in_4bit=True` takes 46 GB instead of 14.

**Why it happens.** For quantized models, trainers call PEFT's `prepare_model_for_kbit_training`, which casts all parameters except the
quantized ones to float32. The quantizers of transformers 5 quantize only linear layers, but its experts are stacked parameters.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=nf4, dtype=torch.bfloat16)
    model = prepare_model_for_kbit_training(model)

**Repaired**

    isotype.enforce(model, policy)            # after prepare_model_for_kbit_training, or instead of it with these two:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()

**What is not reported.** The rule ignores weights that the model's author keeps in float32, adapters, buffers, and weights that add less
than 1 % to the memory of all weights. Experts that no quantization format can store get only a note. Trainable float32 weights get only a note, because a 16-bit weight loses small updates.

**How safe is the fix?** The fix is safe if the weights came from a 16-bit checkpoint, because a cast back to 16 bits then keeps every
value. The fix is unsafe if a cast would change a value, or if the check cannot read the values. Without `prepare_model_for_kbit_training`,
the weights keep the checkpoint's values.

**Seen in** huggingface/peft #3265; bitsandbytes #1515, #1569; axolotl #2621; unslothai/unsloth #1186, #5344;
bitsandbytes #1849.
"""

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.formats import BY_TOOL, FORMATS, why_kept
from isotype.core.names import agree, base_name, format_bytes, listed, stacked
from isotype.records.finding import Cost, Finding
from isotype.records.trace import Trace, Weight
from isotype.rules.kit import costs
from isotype.rules.kit.findings import Findings, advice, finding_of
from isotype.rules.kit.weight_sets import (
    cast_fix,
    counted,
    elements,
    extra_bytes,
    main_dtype,
    names,
    quantized,
)
from isotype.trace.sides import is_adapter

_LEAST_SHARE = 0.01


def find(trace: Trace) -> Findings:
    yield from _experts(trace)
    base = [w for w in trace.weights if not (w.buffer or is_adapter(w.name, w))]
    narrow = [w for w in base if not w.trainable and (w.quantization is not None or w.dtype in HALVES)]
    # The model's author, or the values of a module, may require float32.
    on_purpose = {w.name for w in base if w.pinned or base_name(w.module) in trace.by_ranges}
    float32 = (w for w in base if w.dtype == torch.float32 and w.quantization is None)
    wide = [w for w in float32 if w.name not in on_purpose]
    wanted = _wanted(trace, narrow)
    if wanted is None or not wide or elements(wide) > elements(narrow):
        return
    # `prepare_model_for_kbit_training` leaves no frozen 16-bit weight.
    prepared = all(w.quantization is not None for w in narrow)
    for trainable in (False, True):
        part = sorted((w for w in wide if w.trainable == trainable), key=lambda w: -w.bytes * w.repeats)
        extra = extra_bytes(part, wanted)
        if extra >= _LEAST_SHARE * sum(w.bytes * w.repeats for w in base):
            yield _finding(trace, part, wanted, extra, prepared)


def _experts(trace: Trace) -> Findings:
    """Yield a finding if stacked experts of a quantized model are not quantized."""
    storage = " and ".join(sorted({state.format for _, state in quantized(trace)}))
    experts, size = costs.dense_stacks(trace)
    if not storage or not experts:
        return
    why = why_kept(((weight.name, weight.shape) for weight in experts), storage)
    number = counted(experts, stacked(weight.name for weight in experts), "are")
    bits = FORMATS[storage].bits if storage in FORMATS else 8
    extra = size - size * bits // (8 * experts[0].dtype.itemsize)
    yield finding_of(
        "warning" if why == BY_TOOL else "note",
        f"{number} {dtype_name(experts[0].dtype)} in a model that is quantized to {storage}: {format_bytes(extra)} more memory",
        experts,
        phase="load",
        cause=why,
        fixes=(advice("isotype.load", "load the model with isotype.load"),) * (why == BY_TOOL),
        cost=Cost(memory_bytes=extra),
    )


def _wanted(trace: Trace, narrow: list[Weight]) -> torch.dtype | None:
    if trace.setup.policy is not None:
        dtype = trace.setup.policy.plain
    else:
        dtype = main_dtype(w for w in narrow if w.quantization is None) or trace.setup.compute
    return dtype if dtype in HALVES else None


def _finding(trace: Trace, wide: list[Weight], wanted: torch.dtype, extra: int, prepared: bool) -> Finding:
    target = dtype_name(wanted)
    noun = "trained weight" if wide[0].trainable else "frozen weight"
    more = f"{format_bytes(extra)} more memory"
    message = f"{agree(len(wide), noun, 'are')} float32 in a {target} model: {more}"
    if wide[0].trainable:
        small = f"small updates need float32; weights that are not trained could be {target}"
        cost = Cost(memory_bytes=extra)
        return finding_of("note", message, wide, phase="load", notes=(small,), cost=cost)
    touched = {weight.module for weight in wide}
    casts = [c for c in costs.casts(trace) if c.call.module in touched]
    cast_bytes = sum(cast.bytes for cast in casts if cast.operand.origin.kind == "parameter")
    to_target = cast_fix(f"cast them to {target}", wide, wanted)
    rounds = [f"a cast to {target} may round some of their values"] if to_target.safety == "unsafe" else []
    notes = (f"float32: {listed(names(wide))}", *rounds)
    enforce = "call isotype.enforce(model, policy)"
    how = f"do not call prepare_model_for_kbit_training, or call {enforce} after it" if prepared else enforce
    fixes = (to_target, advice("isotype.enforce", how, "model, policy"))
    cost = Cost(cast_bytes=cast_bytes, memory_bytes=extra)
    return finding_of("warning", message, wide, phase="load", notes=notes, fixes=fixes, cost=cost)
