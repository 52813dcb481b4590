"""FSDP with parameters of several dtypes in one unit

**What it means.** A unit of FSDP (usually a decoder layer) has parameters of several dtypes. FSDP1 flattens all parameters of a unit into
one tensor, so all parameters of the unit need the same dtype. FSDP2 reduces the gradients of a unit's trained parameters in one collective,
so the trained parameters need one dtype. With FSDP1, frozen weights may also be the cause: a bfloat16 base with float32 adapters, or 4-bit
codes that are stored in another dtype than the other weights.

**Why it is bad.** FSDP1 raises `Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32` when it wraps the model.
FSDP2 raises `FSDP expects uniform original parameter dtype but got {torch.bfloat16, torch.float32}` in the first forward.

**An example that fails**

    model = get_peft_model(base_in_bfloat16, config)         # adapters are float32
    FullyShardedDataParallel(model, auto_wrap_policy=by_decoder_layer)

**Repaired**

    fully_shard(layer)                                       # FSDP2: only trained parameters need one dtype
    # with FSDP1: peft.utils.other.fsdp_auto_wrap_policy(model) gives adapters units of their own

**What is not reported.** The rule does not report FSDP2 for a model with a precision policy, because isotype then puts the trained
parameters of each dtype into a separate unit.

**How safe is the fix?** FSDP2, separate units and casts to float32 are safe, because they round no value. A cast of adapters to 16 bits is
unsafe, because 16-bit adapters lose small updates (IST801). A cast of other parameters is unsafe if it may round them.

**Seen in** huggingface/trl #1723; hiyouga/LlamaFactory #3853, #10346; IBM/activated-lora #13; bitsandbytes-foundation/bitsandbytes #1709;
modelscope/twinkle #182; NVIDIA-NeMo/Automodel #1677; huggingface/accelerate #3985.
"""

import math

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import grouped
from isotype.records.trace import Trace, Weight
from isotype.rules.kit.findings import Findings, Fixes, advice, finding_of, fix, setting
from isotype.rules.kit.weight_sets import float32_masters, is_exact, layer_of, main_dtype, names, trained


def find(trace: Trace) -> Findings:
    sharded = any(weight.unit is not None for weight in trace.weights)
    version = 2 if sharded else trace.setup.fsdp
    if version == 2 and (sharded or trace.setup.policy is None):
        # isotype shards a policy's model, and groups trained weights by dtype.
        whole = (weight for weight in trained(trace) if weight.quantization is None)
        weights = [weight for weight in whole if weight.unit is not None or not sharded]
    else:
        weights = [weight for weight in trace.weights if version == 1 and not weight.buffer]
    # Integer codes belong to IST702.
    floats = (weight for weight in weights if weight.dtype.is_floating_point)
    units = grouped(floats, lambda w: layer_of(w.name) if w.unit is None else w.unit)
    mixed = {unit: group for unit, group in units.items() if len({weight.dtype for weight in group}) > 1}
    in_mixed = [weight for group in mixed.values() for weight in group]
    # Quantized codes may be packed in any dtype, so only the dtypes of other weights count.
    most = main_dtype(in_mixed, lambda weight: 0 if weight.quantization else math.prod(weight.shape))
    if most is None:
        return
    mismatched = [weight for weight in in_mixed if weight.dtype != most]
    dtypes = dict.fromkeys(weight.dtype for weight in in_mixed)
    where = f"{len(mixed)} units" if len(mixed) > 1 else next(iter(mixed)) or "the outermost unit"
    verb, error, separator = _REFUSALS[version]
    yield finding_of(
        "error",
        f"FSDP{version} cannot {verb} {' and '.join(map(dtype_name, dtypes))} together in {where}",
        mismatched,
        phase="load" if version == 1 else "forward",
        notes=(f"FSDP raises: {error.format(separator.join(map(str, dtypes)))}",),
        fixes=tuple(_fixes(trace, version, mismatched, most)),
    )


_REFUSALS = {
    1: ("flatten", "Must flatten tensors with uniform dtype but got {}", " and "),
    2: ("reduce the gradients of", "FSDP expects uniform original parameter dtype but got {{{}}}", ", "),
}


def _fixes(trace: Trace, version: int, mismatched: list[Weight], most: torch.dtype) -> Fixes:
    packed = [weight for weight in mismatched if weight.quantization is not None]
    plain = [weight for weight in mismatched if weight.quantization is None]
    if packed:
        how = f"load with bnb_4bit_quant_storage={dtype_name(most)}, and cast all other parameters to this dtype"
        yield advice("bnb_4bit_quant_storage", how)
        return
    safe = is_exact(plain, most) and not any(weight.trainable for weight in plain)
    to_most = f"cast the other parameters to {dtype_name(most)}"
    cast = fix(to_most, "parameter", names(plain), dtype_name(most), safe)
    if safe:
        yield cast
    first = version == 1
    # FSDP2 reduces all gradients of a unit together, so trained parameters need one dtype.
    if first and len({weight.dtype for weight in trained(trace)}) <= 1:
        yield setting("shard with FSDP2, which keeps each parameter's dtype", "fsdp", "2")
    elif not first or all(weight.trainable for weight in trace.weights if not weight.buffer):
        yield from float32_masters(trace, trained(trace))
    if not safe:
        yield cast
    modules = {weight.module for weight in mismatched}
    beside = any(w.module in modules and w.dtype == most for w in trained(trace))
    if not first and not beside:
        how = (
            "before you shard a layer, shard its modules of another dtype separately: fully_shard(layer.norm)"
        )
        yield advice("fully_shard", how)
    elif first and any(weight.adapter for weight in mismatched):
        how = "put the adapters into separate units: peft.utils.other.fsdp_auto_wrap_policy(model)"
        yield advice("auto_wrap_policy", how)
