"""cuDNN kernels that may return NaN or wrong values

**What it means.** On H100, H200 and B200, cuDNN's kernel computes attention with a mask. Up to torch 2.13, the kernel reads a float32 mask
of 16-bit queries as if the mask were 16-bit. Its outputs are wrong or NaN, and no error is raised. On Hopper (H100, H200), there is a
second error. In torch 2.11 to 2.14, the backward of this kernel may return NaN as the gradient of the queries. NaN occurs if two conditions
hold: the number of keys is a multiple of 128 plus 64, and all scores of a row are below -88, as in heads of Qwen2.5 that attend to a single
token. On GTX 16 cards (GTX 1650, GTX 1660), float16 convolutions of images may return NaN.

**Why it is bad.** The loss stays finite, the gradients of one step are NaN, and every weight is NaN from the next step on. Padded batches
differ in length, so the first NaN may occur only after minutes or days.

**Why it happens.** The kernel works on tiles of 128 keys. For the empty half of the last tile, the kernel uses scores of 0 instead of minus
infinity. The kernel subtracts the largest score of the row, which is below -88. Then exp(0 + 88) is infinite in float32. The cause of NaN
in convolutions is not known. The public reports use torch 1.8 to 1.11 with CUDA 11.

**An example that fails**

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")     # on an H100, batches padded to 704 tokens

**Repaired**

    torch.backends.cuda.enable_cudnn_sdp(False)     # before the training; isotype's trainings do it

A float32 mask must be cast to the dtype of the queries, because torch's other kernel does not accept it.

**How safe is the fix?** The fix is safe: torch then uses another kernel, which computes the same attention. The cuDNN of torch 2.15 does
not have the error. Convolutions in float32 are safe, but take twice the memory.

**Seen in** pytorch/pytorch #58123, #69449, #77955, #191612, #196678; NVIDIA-NeMo/Automodel #2617; ultralytics/yolov5 #5815, #7908;
dreamgaussian/dreamgaussian #36; huggingface/trl #7181 (DPO and KTO); kyutai-labs/pocket-tts #264.
"""

import re
from collections.abc import Sequence

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import plural
from isotype.precision.devices.attention import (
    CUDNN_TILE,
    AttentionCall,
    enabled_attention,
    may_return_nan,
    misreads_masks,
)
from isotype.records.trace import Call, Operand, Trace
from isotype.rules.kit.findings import Findings, advice, finding_at
from isotype.rules.kit.words import cause_text

KIND = "device"

_KERNELS = ("cudnn_attention", "flash_attention_for_cpu")
"""Names of cuDNN's attention operator, and of the CPU operator that a trace on fake tensors records in its place."""
_MASKS = ("attn_mask", "attn_bias")
_GTX_16 = re.compile(r"\bGTX 16\d\d\b")
_SWITCH = "torch.backends.cuda.enable_cudnn_sdp"


def find(trace: Trace) -> Findings:
    yield from _attention(trace)
    title = trace.setup.profile.title
    calls = [call for call in trace.calls if call.phase == "forward" and _of_images(call)]
    if calls and _GTX_16.search(title):
        yield finding_at(
            "warning",
            f"float16 convolutions may return NaN on {title}",
            calls,
            cause="GTX 16 cards: https://github.com/pytorch/pytorch/issues/77955",
            notes=(plural(sum(call.repeats for call in calls), "convolution"),),
            fixes=(advice("float32", "compute the convolutions in float32, without autocast", "float32"),),
        )


def _of_images(call: Call) -> bool:
    operands = call.operands if call.op.startswith("aten.convolution") else ()
    return any(len(operand.shape) == 4 and operand.dtype == torch.float16 for operand in operands)


def _attention(trace: Trace) -> Findings:
    if "cudnn" not in enabled_attention():
        return
    fused = [call for call in trace.calls if any(part in call.op for part in _KERNELS)]
    yield from _misread_masks(trace, [call for call in fused if call.phase != "backward"])
    if all(call.phase != "backward" for call in fused):
        return
    calls = [call for call in fused if call.phase == "forward" and _may_return_nan(trace, call)]
    if not calls:
        return
    hit = [call for call in calls if _keys(call) % CUDNN_TILE == CUDNN_TILE // 2]
    lengths = f"at {_keys(hit[0])} tokens" if hit else "at lengths that are 64 more than a multiple of 128"
    yield finding_at(
        "warning" if hit else "note",
        f"cuDNN's attention with a mask may return NaN for the queries' gradients {lengths}",
        hit or calls,
        cause=f"the cuDNN of torch 2.11 to 2.14 on {trace.setup.profile.title}",
        notes=(plural(sum(call.repeats for call in hit or calls), "attention call"),),
        fixes=(advice(_SWITCH, f"{_SWITCH}(False) before the training, or torch 2.15", "False"),),
    )


def _misread_masks(trace: Trace, fused: Sequence[Call]) -> Findings:
    profile = trace.setup.profile
    masks = [(call, _mask(call)) for call in fused]
    wrong = [
        (call, mask.origin.cause)
        for call, mask in masks
        if mask is not None and mask.dtype == torch.float32 and (described := _described(call))
        if described.dtype != mask.dtype and misreads_masks(profile, described)
    ]
    if not wrong:
        return
    dtype = dtype_name(wrong[0][0].operands[0].dtype)
    yield finding_at(
        "error",
        f"cuDNN's attention reads a float32 mask as {dtype}: its outputs are wrong",
        [call for call, _ in wrong],
        cause=cause_text(wrong[0][1], trace.owners),
        notes=(
            f"torch 2.13 and earlier on {profile.title} raise no error",
            "see https://github.com/pytorch/pytorch/pull/191612",
        ),
        fixes=(advice("attn_mask", f"cast the mask to {dtype}, or use torch 2.14", dtype),),
    )


def _may_return_nan(trace: Trace, call: Call) -> bool:
    described = _described(call)
    return described is not None and may_return_nan(trace.setup.profile, described)


def _mask(call: Call) -> Operand | None:
    return next((operand for operand in call.operands if operand.role in _MASKS), None)


def _described(call: Call) -> AttentionCall | None:
    operands = {operand.role: operand for operand in call.operands}
    if call.breach is not None or not {"query", "key", "value"} <= operands.keys():
        return None
    query, key, value = (operands[name].shape for name in ("query", "key", "value"))
    sizes = query[-1], key[-1], value[-1]
    return AttentionCall(operands["query"].dtype, query[-3], key[-3], sizes, _mask(call) is not None)


def _keys(call: Call) -> int:
    return next(operand.shape[-2] for operand in call.operands if operand.role == "key")
