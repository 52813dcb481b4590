"""Token ids, labels or masks that an operator does not accept

**What it means.** An operator does not accept token ids, positions, labels or a mask. Either an index is too large for the table that the
operator reads, or the operator does not accept the dtype of the tensor.

**Why it happens.** An index is too large if a token was added to the tokenizer but the embeddings were not resized. An index is also too
large if rows are longer than the table of positions, or if labels are not below the number of classes. A dtype is refused if labels from
NumPy are int32, if a bool mask is subtracted (`1 - mask`), or if attention gets a tokenizer's mask of zeros and ones. A dtype is also
refused if integer one-hot rows are multiplied with a float weight, or if two integer matrices are multiplied on a GPU. Code that casts a
whole batch to a float dtype also casts its token ids, labels and masks.

**Why it is bad.** The step fails. On a GPU, the error appears at a later line: `CUDA error: device-side assert triggered`.

**An example that fails**

    tokenizer.add_special_tokens({"pad_token": "<pad>"})        # id 32000; the embedding has 32000 rows
    model(**tokenizer(texts, padding=True, return_tensors="pt"))

**Repaired**

    model.resize_token_embeddings(len(tokenizer))

**What is not reported.** The check does not know the values of weights. Therefore the check does not report indices that depend on weights,
such as the experts that a router chooses.

**How safe is the fix?** The fix is safe: you edit the code or the data. New rows of an embedding have random values. Train these rows, and
save them with the adapter (`modules_to_save`, `trainable_token_indices`). Shorter rows lose tokens. Casts of int32 and bool tensors are
exact, but no cast restores token ids that a float dtype has rounded.

**Seen in** huggingface/transformers #11102, #12763; mickeysjm/R-BERT #5; meta-llama/llama-cookbook #189; deepspeedai/DeepSpeed #5701;
QwenLM/Qwen3 #44; intel/auto-round #1380; seal-rg/recurrent-pretraining #23.
"""

from dataclasses import replace

from isotype.core.dtypes import EXACT_INTEGERS, dtype_name, named_integer
from isotype.core.names import grouped, plain_name, short
from isotype.core.operators import MASKED, float_indices
from isotype.records.finding import Finding, Fix
from isotype.records.trace import Call, Operand, Trace
from isotype.rules.kit.findings import Findings, advice, finding_at
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.words import at, cause_text, device_error, evidence, place


def _refused(call: Call) -> Operand | None:
    """Return the float operand that must be an integer, or the operand whose integer dtype the error names."""
    if call.refusal and (floats := float_indices(call.op, [operand.dtype for operand in call.operands])):
        operand = call.operands[floats[0]]
        before = operand.origin.before if operand.origin.kind == "autocast" else None
        return replace(operand, dtype=before.dtype, origin=before) if before else operand
    dtype = named_integer(call.refusal, (operand.dtype for operand in call.operands))
    return next((operand for operand in call.operands if operand.dtype == dtype), None)


CLAIMS = (Claim("step", lambda broken: _refused(broken.call) is not None),)


def find(trace: Trace) -> Findings:
    """Yield a finding for each line with an index outside of a table, or with a dtype that the operator does not accept."""
    outside = (call for call in trace.calls if call.outside is not None and not call.recomputed)
    for calls in grouped(outside, lambda call: (call.op, call.source, call.outside)).values():
        yield _outside(calls[0], calls)
    causes = {
        call: o.origin.cause for call in trace.breaches() if not call.recomputed and (o := _refused(call))
    }
    # The backward of a product refuses the same tensor.
    of_forward = {cause for call, cause in causes.items() if call.phase == "forward"}
    refused = (call for call, cause in causes.items() if call.phase == "forward" or cause not in of_forward)
    for calls in grouped(refused, _key).values():
        yield _dtype(calls[0], calls, trace)


def _key(call: Call) -> object:
    refused = _refused(call)
    by_dtype = refused is not None and refused.dtype.is_floating_point  # the backward refuses the same tensor
    return refused.origin.cause if refused is not None and by_dtype else (call.op, call.source)


def _outside(call: Call, calls: list[Call]) -> Finding:
    assert call.outside is not None
    index, size = call.outside
    indices = next(operand for operand in call.operands[1:] if not operand.dtype.is_floating_point)
    table, cause = call.operands[0], indices.origin.cause
    of = table.origin.name if table.origin.kind == "parameter" else f"the tensor at {short(call.source)}"
    labels = "nll_loss" in call.op
    message = f"index {index} is out of range for {size} rows"
    if labels:
        message = f"label {index} is not one of {size} classes"
    whose = f"the result of {cause.name or 'the step'}{at(cause.source)}"
    if cause.kind == "input":
        whose = f"the input {cause.name}"
    why = f"{whose} has {index}" + ("" if labels else f", {of} has {size} rows")
    fixes = (_advice(call, labels, cause.kind == "input", size),)
    return finding_at("error", message, calls, cause=why, evidence=evidence(indices.origin), fixes=fixes)


def _advice(call: Call, labels: bool, of_input: bool, size: int) -> Fix:
    if labels:
        how = f"use labels from 0 to {size - 1} (-100 for ignored tokens), or a model with more classes"
        return advice(call.source, how)
    if of_input:
        how = f"resize_token_embeddings(len(tokenizer)), or use ids from 0 to {size - 1}"
        return advice(call.module, how)
    return advice(place(call), f"shorten the rows to at most {size} tokens, or use a longer table")


def _dtype(call: Call, calls: list[Call], trace: Trace) -> Finding:
    refused = _refused(call)
    assert refused is not None
    dtype, line, name = dtype_name(refused.dtype), at(call.source), call.op.split(".")[1]
    how = (
        _without_floats(call, refused, line) if refused.dtype.is_floating_point
        else f"call .long() on the labels{line}" if "nll_loss" in name
        else f"call .bool() on the mask{line}" if "attention" in name
        else f"write ~mask instead of 1 - mask{line}" if name in ("sub", "sub_", "rsub")
        else f"cast the {dtype} tensor to {dtype_name(call.floats[0].dtype)}{line}" if call.floats
        else f"cast the operands to a float dtype{line}"
    )  # fmt: skip
    return finding_at(
        "error",
        f"{name} does not accept this {dtype} tensor",
        calls,
        cause=cause_text(refused.origin.cause, trace.owners),
        evidence=evidence(refused.origin),
        notes=device_error(call.refusal),
        fixes=(advice(place(call), how),),
    )


def _without_floats(call: Call, refused: Operand, line: str) -> str:
    if any(name in call.op for name in (*MASKED, "where")):
        return f"call .bool() on the mask{line}"
    if "lora_embedding" in call.operands[0].origin.name:
        layer = plain_name(call.module)
        return f"remove {layer} from the adapter (exclude_modules={layer!r}): LoRA on an embedding accepts only integer ids"
    cause, exact = refused.origin.cause, EXACT_INTEGERS.get(refused.dtype)
    rounds = f": {dtype_name(refused.dtype)} rounds numbers above {exact}" if exact else ""
    if cause.kind == "input":
        return f"pass {cause.name} in int64{rounds}"
    word = "labels" if "nll_loss" in call.op or "margin_loss" in call.op else "index"
    return f"keep the {word}{line} in int64{rounds}"
