"""
**What it means.** Packed codes (4-bit weights as bytes in one column, int8 weights, GPTQ's int32) are taken for a weight:
multiplied directly, cast, assigned a dense tensor, or asked for their dtype.

**Why it is bad.** It fails with messages that do not name the cause: `mat1 and mat2 shapes cannot be multiplied (6x5120 and
1x2560)`, `got: c10::Half != signed char`, `nn.Module.to only accepts floating point or complex dtypes`; or it runs on
codes that a cast has changed.

**An example that fails**

    parts = layer.weight.split(size)            # pretraining_tp > 1
    torch.cat([F.linear(hidden, part) for part in parts], -1)

**Repaired**

    layer(hidden)                               # the layer unpacks; or dequantize_4bit(weight, weight.quant_state)

**How safe is the fix?** It is a change of code (or of the option that chose that code); only its author can make it.

**Seen in** bitsandbytes-foundation/bitsandbytes #433, #610; unslothai/unsloth #2212; huggingface/peft #929, #1999.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from isotype.dtypes import dtype_name
from isotype.rules.finding import Finding
from isotype.rules.weight_sets import advice, count, finding_of
from isotype.trace.record import Call, Operand, Trace, Weight

TITLE = "Packed codes taken for a weight"

_CODES = (torch.uint8, torch.int8, torch.int32)
_PRODUCTS = ("mm", "addmm", "bmm", "matmul", "linear", "baddbmm")
# What torch says of a product with one packed column, real and fake: "[32, 64] X [1, 1024]", "(32x64 and 1x1024)".
_COLUMN = re.compile(r"X \[1, (\d+)\]|and 1x(\d+)\)")


def find(trace: Trace) -> Iterator[Finding]:
    """Cast or dense tensors where codes belong; products with codes; failures that only codes explain."""
    owners = trace.owners
    cast = [weight for weight in trace.weights if _was_cast(weight)]
    if cast:
        kept = cast[0].quantization
        assert kept is not None
        yield finding_of(
            "IST403",
            "error",
            f"{count(cast)} quantized weights hold {dtype_name(kept.packed)} values where packed codes belong",
            cast,
            cause=f"{cast[0].name} was assigned or cast to {dtype_name(kept.packed)}",
            fixes=(advice(cast[0].module, "load the model again and leave packed weights as they are"),),
        )
    products = [(call, operand) for call in trace.calls for operand in _codes_in(call)]
    if products:
        yield _product(*products[0], len(products))
        return
    # A plain layer around packed codes fails by its shapes, before a dtype is compared.
    bare = [w for w in trace.weights if not w.buffer and w.quantization is None and _is_bare(w)]
    if bare:
        yield finding_of(
            "IST403",
            "error",
            f"{count(bare)} plain {bare[0].module_class} layers hold packed {dtype_name(bare[0].dtype)} codes",
            bare,
            cause=f"{bare[0].name} is {dtype_name(bare[0].dtype)}, its layer multiplies with it as it lies",
            fixes=(
                advice(
                    bare[0].module,
                    "keep the quantized layer, or dequantize its weight, where the model is moved",
                ),
            ),
        )
    elif trace.failure is not None:
        yield from _failed(trace, owners)


def _was_cast(weight: Weight) -> bool:
    kept = weight.quantization
    if kept is None or not kept.present:
        return False
    return kept.packed != kept.storage if kept.storage is not None else kept.packed.is_floating_point


def _is_bare(weight: Weight) -> bool:
    return weight.kind == "linear" and weight.dtype in _CODES and weight.name.endswith("weight")


def _codes_in(call: Call) -> list[Operand]:
    """Packed operands of a product with float ones."""
    name = call.op.split(".")[1] if call.op.startswith("aten.") else ""
    if name not in _PRODUCTS or not any(operand.dtype.is_floating_point for operand in call.operands):
        return []
    return [operand for operand in call.operands if operand.dtype in _CODES]


def _product(call: Call, packed: Operand, total: int) -> Finding:
    float_dtype = next(o.dtype for o in call.operands if o.dtype.is_floating_point)
    said = (f"the device says: {call.breach.message}",) if call.breach is not None else ()
    name = packed.origin.cause.name
    return Finding(
        "IST403",
        "error",
        f"{dtype_name(float_dtype)} activations are multiplied with packed {dtype_name(packed.dtype)} codes",
        module=call.module,
        op=call.op,
        phase=call.phase,
        source=call.source,
        cause=f"{name} holds {dtype_name(packed.dtype)} codes",
        notes=(*((f"{total - 1} more such products",) if total > 1 else ()), *said),
        operands=call.operands,
        fixes=(
            advice(name, "call the quantized layer, or dequantize its weight with its state, at that line"),
        ),
    )


def _failed(trace: Trace, owners: Mapping[str, Weight]) -> Iterator[Finding]:
    failure = trace.failure
    assert failure is not None
    found = _COLUMN.search(failure.error)
    inside = f"{failure.module}." if failure.module else ""
    cause = ""
    if found is not None:
        columns = int(found[1] or found[2])
        packed = [w for w in owners.values() if w.quantization is not None and w.shape[-1:] == (1,)]
        near = [w for w in packed if w.name.startswith(inside) and w.shape[0] % columns == 0]
        cause = f"{near[0].name} holds packed codes, {list(near[0].shape)}" if near else ""
    elif "only accepts floating point or complex dtypes" in failure.error:
        dtype = failure.error.rpartition("torch.")[2]
        holder = next((w for w in owners.values() if dtype_name(w.dtype) == dtype), None)
        cause = f"a module is cast to {dtype}, the dtype of packed codes" + (
            f" ({holder.name})" if holder else ""
        )
    if cause:
        yield Finding(
            "IST403",
            "error",
            "packed codes are taken for a weight",
            module=failure.module,
            phase=failure.phase,
            source=failure.source,
            cause=cause,
            notes=(f"the step ends with {failure.error}",),
            fixes=(
                advice(
                    cause.split(" ", 1)[0], "call the quantized layer, or ask its compute dtype, at that line"
                ),
            ),
        )
