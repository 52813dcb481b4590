"""An attention kernel without support for the device or the dtype

**What it means.** The attention kernel that the model requests does not exist on the device, or does not support the dtype of queries, keys
and values.

**Why it is bad.** FlashAttention supports only float16 and bfloat16. It runs only on AMD's CDNA GPUs and on NVIDIA GPUs of compute
capability 8.0 or later. On other GPUs or with other dtypes, `flash_attention_2` raises "FlashAttention only support fp16 and bf16 data
type" or "FlashAttention only supports Ampere GPUs or newer". In these cases, `sdpa` selects a slower kernel, which stores all attention
scores or runs in float32. If the code disables the slower kernel (`sdpa_kernel`), `sdpa` raises "No available kernel".

**Why it happens.** The script requests `attn_implementation="flash_attention_2"` on older hardware, or with a float32 model and no
autocast. In other cases, float32 norms make the queries float32, as after PEFT's `prepare_model_for_kbit_training`.

**An example that fails**

    AutoModelForCausalLM.from_pretrained(path, attn_implementation="flash_attention_2")      # on a T4

**Repaired**

    AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")

**How safe is the fix?** `sdpa` is a safe fix: all its kernels compute the same function as FlashAttention. A cast of queries, keys and
values rounds them, but changes no weight. A cast of a stored weight is unsafe if it may round values.

**Seen in** huggingface/transformers #25598; unslothai/unsloth #827; axolotl #336; QwenLM/Qwen3 #406;
lucidrains/denoising-diffusion-pytorch #239; lucidrains/x-transformers #143; lucidrains/MEGABYTE-pytorch #6.
"""

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import grouped, plural, short
from isotype.core.operators import ATTENTION_KERNELS
from isotype.records.finding import Finding
from isotype.records.trace import NO_ATTENTION_KERNEL, Call, Trace
from isotype.rules.kit import costs
from isotype.rules.kit.contract_fixes import candidates
from isotype.rules.kit.findings import Findings, advice, finding_at, fix
from isotype.rules.kit.groups import Claim, Group
from isotype.rules.kit.words import cause_text, device_error, evidence, place

_NEEDS = "FlashAttention needs an NVIDIA GPU of compute capability 8.0 or later, or an AMD CDNA GPU"
CLAIMS = (Claim("step", lambda broken: broken.call.refusal == NO_ATTENTION_KERNEL),)


def find(trace: Trace) -> Findings:
    yield from _without_kernel(trace)
    setup = trace.setup
    profile, accepted = setup.profile, setup.profile.flash_attention
    flash = setup.attention is not None and setup.attention.startswith("flash_attention")
    if flash and (profile.kind not in ("cuda", "rocm") or accepted.isdisjoint(HALVES)):
        yield Finding(
            "error",
            f"{setup.attention} does not run on {profile.title}",
            cause=f"the model's config asks for {setup.attention}",
            notes=(_NEEDS,),
            fixes=(advice("attn_implementation", 'load the model with attn_implementation="sdpa"', "sdpa"),),
        )
        return
    if setup.compute not in accepted or profile.kind == "cpu":
        return
    sound = (c for c in trace.calls if c.phase == "forward" and c.operands and c.breach is None)
    fused = (call for call in sound if any(part in call.op for part in ATTENTION_KERNELS))
    for dtype, calls in grouped(fused, lambda call: call.operands[0].dtype).items():
        if dtype not in accepted and dtype.itemsize > setup.compute.itemsize:
            yield _wide(trace, calls, dtype, flash)


def _without_kernel(trace: Trace) -> Findings:
    """Yield a finding for each line with an attention call that no enabled kernel supports."""
    compute, accepted = trace.setup.compute, trace.setup.profile.flash_attention
    refused = (call for call in trace.breaches() if call.refusal == NO_ATTENTION_KERNEL)
    for line, calls in grouped(refused, place).items():
        first, query, where = calls[0], calls[0].operands[0], short(line)
        dtype, casts = first.autocast or query.dtype, []
        if accepted and dtype not in accepted:
            narrow = dtype_name(compute if compute in accepted else min(accepted, key=dtype_name))
            how = f"cast queries, keys and values to {narrow} at {where}, and the result back"
            casts = [fix(how, "line", (line,), narrow)]
        how = f"also enable SDPBackend.EFFICIENT_ATTENTION and SDPBackend.MATH around {where}"
        yield finding_at(
            "error",
            f"no enabled attention kernel accepts these {dtype_name(dtype)} queries on {trace.setup.profile.title}",
            calls,
            cause=f"the code disables other kernels around {where} (sdpa_kernel, sdp_kernel)",
            evidence=evidence(query.origin),
            notes=device_error(first.refusal),
            fixes=(*casts, advice(line, how)),
        )


def _wide(trace: Trace, calls: list[Call], dtype: torch.dtype, flash: bool) -> Finding:
    query = calls[0].operands[0]
    blamed = costs.root(query.origin)
    takes = " and ".join(sorted(map(dtype_name, trace.setup.profile.flash_attention)))
    group = Group(tuple(calls), query, (blamed,), trace.setup.compute, trace.setup.compute)
    number = plural(sum(call.repeats for call in calls), "attention call")
    effect = "raises" if flash else "uses a slower kernel"
    message = f"attention with {dtype_name(dtype)} queries {effect}: flash kernels accept only {takes}"
    if trace.setup.attention == "flex_attention":  # its own kernel takes float32
        message = f"FlexAttention runs in {dtype_name(dtype)}, but is faster in {takes}"
    return finding_at(
        "error" if flash else "warning",
        message,
        calls,
        cause=cause_text(blamed, trace.owners),
        evidence=evidence(query.origin),
        notes=(number,),
        fixes=tuple(candidates(trace, group)),
    )
