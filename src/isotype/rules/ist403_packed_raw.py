"""Packed codes used as a weight

**What it means.** Code uses the packed codes of a quantized weight as if they were a plain weight. For example, code multiplies or casts
the codes, copies them into a plain layer, or casts activations to the dtype of the codes. Packed codes are stored as a column of bytes
(4-bit weights), as int8 (8-bit weights), or as int32 (GPTQ).

**Why it is bad.** The step fails with errors that do not name the cause: `mat1 and mat2 shapes cannot be multiplied (6x5120 and 1x2560)`,
`got: c10::Half != signed char`, `nn.Module.to only accepts floating point or complex dtypes`. In other cases, no error is raised, but a
cast has changed the codes, or has rounded the activations to integers.

**An example that fails**

    parts = layer.weight.split(size)            # pretraining_tp > 1
    torch.cat([F.linear(hidden, part) for part in parts], -1)

**Repaired**

    layer(hidden)      # the layer dequantizes its weight; or call dequantize_4bit(weight, weight.quant_state)
    BitsAndBytesConfig(…, llm_int8_skip_modules=["out_proj"])  # if a module reads the weight of its child out_proj

**How safe is the fix?** The fix is safe: you edit the code or the quantization config, so that the step uses the dequantized weight. A
layer that is not quantized takes more memory. If the packed codes were overwritten, load the model again.

**Seen in** bitsandbytes-foundation/bitsandbytes #433, #610, #963; unslothai/unsloth #2212; unslothai/unsloth-zoo #1132;
huggingface/peft #929, #1720, #1999; haotian-liu/LLaVA #783; modelscope/ms-swift #698; MNoorFawi/curlora #5;
TransformerLensOrg/TransformerLens #1276.
"""

import re
from collections.abc import Mapping

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import base_name, in_module, listed, named, short
from isotype.records.finding import Finding, Fix
from isotype.records.trace import Call, Failure, Operand, Trace, Weight
from isotype.rules.kit.findings import Findings, advice, finding_after, finding_at, finding_of
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.weight_sets import counted, quantized
from isotype.rules.kit.words import device_error, more, op_name

CLAIMS = (Claim("dtype", lambda broken: broken.lacks_kernel and broken.packed),)

_CODES = (torch.uint8, torch.int8, torch.int32)
_PRODUCTS = ("mm", "addmm", "bmm", "matmul", "linear", "baddbmm")
# torch's errors for packed codes of one column: of a product, fake and real ("[32, 64] X [1, 1024]", "(32x64 and 1x1024)"),
# and of a reshape ("shape '[1024, 1]' is invalid").
_COLUMN = re.compile(r"X \[1, (\d+)\]|and 1x(\d+)\)|shape '\[(\d+), 1\]' is invalid")
_DIFFERENT = re.compile(r"dtype|scalar type|size|shape|dimension")
_NO_GRADIENT = re.compile(r"only Tensors of floating point .*can require gradients")
_LORA = "train quantized layers with LoRA (LoraConfig), which calls the layer, because this adapter reads the packed weight; or do not quantize the model"
_BYTES = re.compile(r"\b(Byte|Char|uint8|int8)\b")
_ROUNDING = ("round", "clamp", "floor", "trunc")


def find(trace: Trace) -> Findings:
    cast = [
        (weight, dtype_name(q.packed))
        for weight, q in quantized(trace)
        if q.present and (q.packed.is_floating_point if q.storage is None else q.packed != q.storage)
    ]
    if cast:
        (first, dtype), weights = cast[0], [weight for weight, _ in cast]
        yield finding_of(
            "error",
            f"{counted(weights, 'quantized weight', 'hold')} {dtype} values where packed codes belong",
            weights,
            cause=f"{first.name} was assigned or cast to {dtype}",
            fixes=(advice(first.module, "load the model again, and do not change the packed weights"),),
        )
    rounded = _activations_as_codes(trace)
    if rounded:
        yield _rounded(trace, rounded)
    products = [(call, operand) for call in trace.calls for operand in _codes_in(call)]
    if products:
        yield _product(*products[0], len(products))
        return
    # With packed codes, the shapes make a plain layer fail before its dtypes are compared.
    bare = [w for w in trace.weights if not w.buffer and w.quantization is None and _is_bare(w)]
    if bare:
        plain, dtype = f"plain {bare[0].module_class} layer", dtype_name(bare[0].dtype)
        how = "at the line that copies this weight out of its quantized layer, dequantize the weight, or keep the quantized layer"
        yield finding_of(
            "error",
            f"{counted(bare, plain, 'hold')} packed {dtype} codes",
            bare,
            cause=f"{bare[0].name} is {dtype}, and its layer multiplies with the packed bytes",
            fixes=(advice(bare[0].module, how),),
        )
    failure = trace.failure
    explanation = None if bare or failure is None else _cause(failure, trace.owners)
    if failure is not None and explanation is not None:
        cause, fix = explanation
        message = "packed codes are used as a weight"
        notes = (f"the step ends with {failure.error}", "nothing after the error was checked")
        yield finding_after("error", message, failure, cause=cause, notes=notes, fixes=(fix,), places=())


def explains(trace: Trace, failure: Failure) -> bool:
    """Return True if the step failed because code uses packed codes as if they were the weight."""
    layer = next((w for w in trace.weights if w.module == failure.module and _is_bare(w)), None)
    return layer is not None or _cause(failure, trace.owners) is not None


def _is_bare(weight: Weight) -> bool:
    return weight.kind == "linear" and weight.dtype in _CODES and weight.name.endswith("weight")


def _codes_in(call: Call) -> list[Operand]:
    floats = any(operand.dtype.is_floating_point for operand in call.operands)
    product = op_name(call) in _PRODUCTS and floats
    return [operand for operand in call.operands if product and operand.dtype in _CODES]


def _product(call: Call, packed: Operand, total: int) -> Finding:
    float_dtype = next(o.dtype for o in call.operands if o.dtype.is_floating_point)
    name = packed.origin.cause.name
    how = (
        "call the quantized layer at that line, or dequantize the layer's weight with its quantization state"
    )
    return finding_at(
        "error",
        f"{dtype_name(float_dtype)} activations are multiplied with packed {dtype_name(packed.dtype)} codes",
        [call],
        cause=f"{name} holds {dtype_name(packed.dtype)} codes",
        notes=(*more(total - 1, "such product"), *device_error(call.refusal)),
        fixes=(advice(name, how),),
    )


def _activations_as_codes(trace: Trace) -> list[Call]:
    """Return the casts of float activations to the dtype of packed codes that a cast back or an error about bytes
    follows.

    The function ignores a cast directly after a rounding, because such code quantizes on purpose.
    """
    refused = trace.failure is not None and _BYTES.search(trace.failure.error)
    codes = {(weight.module, weight.dtype) for weight, _ in quantized(trace) if weight.dtype in _CODES}
    by_source: dict[str, list[Call]] = {}
    back: set[str] = set()
    before = ""
    for call in trace.calls if codes else ():
        if call.op == "aten._to_copy.default" and call.phase in ("forward", "generate"):
            operand, result = call.operands[0], call.results[0][0]
            if result.is_floating_point and operand.dtype in _CODES:
                back.add(operand.origin.cause.source)
            elif operand.dtype.is_floating_point and not any(name in before for name in _ROUNDING):
                inside = f"{call.module}."
                if any(dtype == result and module.startswith(inside) for module, dtype in codes):
                    by_source.setdefault(call.source, []).append(call)
        before = call.op
    return [call for source, calls in by_source.items() if refused or source in back for call in calls]


def _rounded(trace: Trace, casts: list[Call]) -> Finding:
    first = casts[0]
    codes = dtype_name(first.results[0][0])
    layer = next(weight for weight, _ in quantized(trace) if weight.module.startswith(f"{first.module}."))
    others = more(sum(call.repeats for call in casts) - 1, "such cast")
    lost = "no error is raised: the activations lose fractions and signs, and the cast has no gradient"
    if trace.failure is not None:
        lost = f"the step ends with {trace.failure.error}"
    how = (
        "cast the activations to the layers' compute dtype, or cast only if the target dtype is a float dtype"
    )
    return finding_at(
        "error",
        f"{dtype_name(first.operands[0].dtype)} activations are cast to {codes}, the dtype of packed codes",
        casts,
        cause=f"a cast at {short(first.source)} to {codes}, the storage dtype of {layer.name}",
        notes=(*others, lost),
        fixes=(advice(layer.module, how),),
    )


def _cause(failure: Failure, owners: Mapping[str, Weight]) -> tuple[str, Fix] | None:
    """Return (cause, fix) if packed codes caused the failure; otherwise return None."""
    read = [w for w in owners.values() if w.reader and w.quantization and in_module(w.module, failure.module)]
    if read and _DIFFERENT.search(failure.error):
        names = dict.fromkeys(_layer(weight.name) for weight in read)
        kept = (n for n, w in owners.items() if n in w.tied or (w.module_class == "Linear" and not w.adapter))
        skipped = ", ".join(f'"{name}"' for name in names | dict.fromkeys(map(_layer, kept)))
        how = f"load the model with BitsAndBytesConfig(…, llm_int8_skip_modules=[{skipped}])"
        return f"{read[0].reader} reads the packed codes of {listed(names)}", advice(read[0].module, how)
    column = _COLUMN.search(failure.error)
    if column is not None:
        columns = int(column[1] or column[2] or column[3])
        inside = f"{failure.module}." if failure.module else ""
        packed = [w for w in owners.values() if _is_column(w, owners) and w.shape[0] % columns == 0]
        near = next((w for w in packed if w.name.startswith(inside)), None)
        if near is None:
            return None
        adapted = any(w.adapter and w.name.startswith(inside) for w in owners.values())
        fix = advice(failure.module, _LORA) if adapted else _unpack(near, failure)
        return f"{near.name} holds packed codes of shape {list(near.shape)}", fix
    codes = next((w for w in owners.values() if w.dtype in _CODES), None)
    if codes is not None and _NO_GRADIENT.search(failure.error):
        how = "set requires_grad only for float parameters, or do not quantize this layer (llm_int8_skip_modules)"
        cause = f"{codes.name} holds {dtype_name(codes.dtype)} codes, which have no gradient"
        return cause, advice(codes.module, how)
    if "only accepts floating point or complex dtypes" not in failure.error:
        return None
    dtype = failure.error.rpartition("torch.")[2]
    holder = next((w for w in owners.values() if dtype_name(w.dtype) == dtype), None)
    holding = f" ({holder.name})" if holder else ""
    cause = f"a module is cast to {dtype}, the dtype of packed codes{holding}"
    return cause, advice(failure.module, "read the layer's compute dtype, not the dtype of its packed codes")


def _layer(weight: str) -> str:
    """Return the last two parts of the name of a weight's layer, without the parts that wrappers such as PEFT add."""
    return ".".join(base_name(weight).split(".")[:-1][-2:])


def _is_column(weight: Weight, owners: Mapping[str, Weight]) -> bool:
    """Return True if a weight is one column of codes, the shape of bitsandbytes' packed 4-bit weights.

    A buffer has the codes of a quantized weight if it has the weight's dtype and shape.
    """
    if weight.shape[-1:] != (1,) or (weight.quantization is None and weight.dtype not in _CODES):
        return False
    same = (
        w for w in owners.values() if w.quantization and (w.dtype, w.shape) == (weight.dtype, weight.shape)
    )
    return not weight.buffer or next(same, None) is not None


def _unpack(weight: Weight, failure: Failure) -> Fix:
    how = "unpack the weight at that line: bitsandbytes.functional.dequantize_4bit(weight, quant_state), or bitsandbytes.matmul_4bit; if the quant_state is lost, load the model again"
    if weight.kind == "linear4bit" and weight.module != failure.module:
        layer, reader = named(weight.module), named(failure.module)
        how = f"do not quantize {layer} (llm_int8_skip_modules), because {reader} reads the layer's packed weight; or let {reader} call the layer"
    return advice(weight.module, how)
