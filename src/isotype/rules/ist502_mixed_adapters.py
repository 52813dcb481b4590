"""Trained adapters of different dtypes

**What it means.** The trained adapters do not all have the same dtype.

**Why it is bad.** PEFT loads all weights of an adapter file in one dtype: float32 (`autocast_adapter_dtype`), or the dtype of the base
model. If this dtype is a 16-bit dtype, float32 adapters are rounded, so a resumed training does not continue with the trained values. FSDP
cannot flatten parameters of several dtypes into one tensor. The 16-bit adapters lose small updates.

**Why it happens.** A trainer casts only some of the trainable parameters. For example, TRL casts adapters of a quantized model to bfloat16,
but not DoRA's magnitudes. In other cases, the model has an adapter from a float16 file and a new adapter. A trained copy
(`modules_to_save`) may also keep the dtype of the base model.

**An example**

    model = get_peft_model(base, LoraConfig(use_dora=True))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)

**Repaired**

    isotype.enforce(model, policy)        # casts adapters to the policy's master dtype, by default float32

**What is not reported.** The rule ignores frozen adapters. IST304 and IST801 report adapters that all have the same wrong dtype.

**How safe is the fix?** The fix is safe: all adapters get the widest of their dtypes, or float32, and keep every value.

**Seen in** huggingface/peft #2421; huggingface/diffusers #6514.
"""

from isotype.core.dtypes import FLOATS, dtype_name
from isotype.core.names import grouped
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, finding_of, fix
from isotype.rules.kit.weight_sets import count, names, trained


def find(trace: Trace) -> Findings:
    adapters = [weight for weight in trained(trace) if weight.adapter and weight.dtype in FLOATS]
    by_dtype = grouped(adapters, lambda weight: weight.dtype)
    dtypes = sorted(by_dtype, key=lambda dtype: (dtype.itemsize, dtype_name(dtype)))
    if len(dtypes) < 2:
        return
    target = dtype_name(dtypes[-1]) if dtypes[-1].itemsize > 2 else "float32"
    wrong = (weight for weight in adapters if dtype_name(weight.dtype) != target)
    narrow = sorted(wrong, key=lambda weight: len(by_dtype[weight.dtype]))
    counts = ", ".join(f"{count(by_dtype[dtype])} in {dtype_name(dtype)}" for dtype in dtypes)
    message = f"the trained adapters have different dtypes: {counts}"
    notes = ("the adapters are saved in these dtypes; loading the adapters again casts them to one dtype",)
    fixes = (fix(f"cast every adapter to {target}", "parameter", names(narrow), target),)
    yield finding_of("note", message, narrow, phase="load", notes=notes, fixes=fixes)
