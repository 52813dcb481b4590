"""
**What it means.** A GradScaler gets float16 gradients. `unscale_` refuses them: dividing by the scale in
float16 would bring back the underflow that the scale was there to prevent. A gradient has its parameter's
dtype, so some trainable parameter is float16: an adapter made in the base's dtype, a trained copy
(`modules_to_save`), a model cast by `.half()` after its adapters were added, adapters loaded from a float16
file.

**Why it is bad.** The run stops at its first optimizer step with `ValueError: Attempting to unscale FP16
gradients.`

**An example that fails**

    model = get_peft_model(model.half(), config, autocast_adapter_dtype=False)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)                 # ValueError

**Repaired**

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()

**How safe is the fix?** float32 represents every float16 value: nothing is lost. Frozen weights stay float16;
adapters are a small part of the memory.

**Seen in** huggingface/peft #1249, #1706, #341; huggingface/diffusers #5004, #6514; oobabooga/textgen #5268;
yk7333/d3po #6; koda-dernet/Side-Step #39.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from isotype.core.dtypes import dtype_name
from isotype.records.finding import Finding, Fix
from isotype.records.trace import Trace, Weight
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.weight_sets import count, finding_of, float32_masters, modules, trained
from isotype.rules.kit.words import device_says, fix

TITLE = "GradScaler with float16 trainable parameters"
CLAIMS = (Claim("step", lambda broken: broken.call.phase == "unscale", grouped=False),)


def find(trace: Trace) -> Iterator[Finding]:
    """Yield float16 gradients that the unscale phase refuses, or would refuse if the step reached it."""
    if not trace.setup.scaler or "unscale" not in trace.setup.phases:
        return
    half = _refused(trace)
    moved = tuple(weight for weight in half if weight.was is not None)
    if half:
        yield finding_of(
            "IST301",
            "error",
            f"GradScaler refuses the float16 gradients of {count(half)} of {count(trained(trace))} trainable parameters",
            half,
            cause=_cast_by_the_step(moved[0]) if moved == half else "",
            phase="unscale",
            op="GradScaler.unscale_",
            notes=device_says("Attempting to unscale FP16 gradients."),
            fixes=(*_float32_inputs(moved), *float32_masters(trace, half)),
        )


def _cast_by_the_step(weight: Weight) -> str:
    assert weight.was is not None
    return f"{weight.name} is cast from {dtype_name(weight.was)} to {dtype_name(weight.dtype)} by the step's own code"


def _float32_inputs(moved: Sequence[Weight]) -> Iterator[Fix]:
    """Yield the fix for code that casts its parameters to its input's dtype: casting the parameters would not
    last.
    """
    places = modules(moved)
    if places:
        yield fix(f"take the inputs of {', '.join(places)} in float32", "input", places, "float32")


def _refused(trace: Trace) -> tuple[Weight, ...]:
    half = trained(trace, torch.float16)
    if trace.failure is not None and trace.failure.phase not in ("unscale", "optimizer"):
        return half
    refused = {
        operand.origin.name
        for call in trace.breaches()
        if call.op == "GradScaler.unscale_"
        for operand in call.operands
    }
    return tuple(weight for weight in half if refused.intersection((weight.name, *weight.tied)))
