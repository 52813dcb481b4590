"""GradScaler with float16 trainable parameters

**What it means.** A GradScaler gets float16 gradients. `GradScaler.unscale_` raises an error for float16 gradients, because a division by
the loss scale in float16 would turn small gradients into zero. A gradient has the dtype of its parameter, so the cause is a trainable
float16 parameter:

- an adapter or a trained copy (`modules_to_save`) that was created in the dtype of the base model;
- an adapter that was cast together with its model (`.half()`);
- an adapter from a float16 file.

The rule also reports complex gradients (Fourier neural operators), because `unscale_` has no kernel for them.

**Why it is bad.** The training stops at its first optimizer step with `ValueError: Attempting to unscale FP16 gradients.`

**An example that fails**

    model = get_peft_model(model.half(), config, autocast_adapter_dtype=False)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)                 # ValueError

**Repaired**

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()

**How safe is the fix?** The fix is safe: it casts the trainable parameters to float32, which represents every float16 value. Frozen weights
stay float16, so the step needs little more memory. For complex weights, you edit the model so that it trains `torch.view_as_real(weight)`,
which has the same values.

**Seen in** huggingface/peft #1249, #1706, #341; huggingface/diffusers #5004, #6514; oobabooga/textgen #5268; yk7333/d3po #6;
koda-dernet/Side-Step #39; mk-minchul/AdaFace #127; QwenAudio/FunMusic #28; pytorch/pytorch #58228; SJTU-DMTai/LIFT #9;
Lightning-AI/pytorch-lightning #5140, #7078; huggingface/accelerate #1778.
"""

import torch

from isotype.core.dtypes import dtype_name
from isotype.records.trace import Trace, Weight
from isotype.rules.kit.findings import Findings, advice, finding_of, fix
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.weight_sets import count, counted, float32_masters, modules, trained
from isotype.rules.kit.words import device_error

CLAIMS = (Claim("step", lambda broken: broken.call.phase == "unscale"),)

_UNSCALES = {"phase": "unscale", "op": "GradScaler.unscale_"}


def find(trace: Trace) -> Findings:
    if not trace.setup.scaler or "unscale" not in trace.setup.phases:
        return
    half = _refused(trace)
    yield from _complex(trace)
    if not half:
        return
    cast = {weight.name: weight.was for weight in half if weight.was is not None}
    cause, fixes = "", float32_masters(trace, half)
    if cast:
        # The step's code casts its parameters to its input's dtype, so a cast of the parameters would not last.
        places = modules(weight for weight in half if weight.name in cast)
        text = f"cast the inputs of {', '.join(places)} to float32"
        fixes = (fix(text, "input", places, "float32"), *fixes)
    if len(cast) == len(half):
        name, before = next(iter(cast.items()))
        cause = f"the code of the step casts {name} from {dtype_name(before)} to float16"
    message = f"GradScaler does not accept the float16 gradients of {count(half)} of {count(trained(trace))} trainable parameters"
    notes = device_error("Attempting to unscale FP16 gradients.")
    yield finding_of("error", message, half, cause=cause, notes=notes, fixes=fixes, **_UNSCALES)


def _complex(trace: Trace) -> Findings:
    weights = [weight for weight in trace.weights if weight.trainable and weight.dtype.is_complex]
    refused = (call for call in trace.breaches() if call.phase == "unscale")
    calls = [call for call in refused if any(operand.dtype.is_complex for operand in call.operands)]
    if calls and weights:
        message = f"GradScaler has no kernel for the complex gradients of {counted(weights, 'parameter')}"
        how = "keep torch.view_as_real(weight) as the parameter, and call torch.view_as_complex(weight) in the forward"
        fixes = (advice(weights[0].name, how, "view_as_real"),)
        yield finding_of(
            "error", message, weights, notes=device_error(calls[0].refusal), fixes=fixes, **_UNSCALES
        )


def _refused(trace: Trace) -> tuple[Weight, ...]:
    half = trained(trace, torch.float16)
    if trace.failure is not None and trace.failure.phase not in ("unscale", "optimizer"):
        return half
    calls = [call for call in trace.breaches() if call.op == "GradScaler.unscale_"]
    if any(not call.operands for call in calls):
        return half  # in a real step, all float16 gradients count
    refused = {operand.origin.name for call in calls for operand in call.operands}
    return tuple(weight for weight in half if refused.intersection((weight.name, *weight.tied)))
