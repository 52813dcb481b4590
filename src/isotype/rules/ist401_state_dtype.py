"""A quantization state whose dtype is not its layer's compute dtype

**What it means.** The quantization state of a 4-bit layer (`weight.quant_state`) stores a dtype: dequantizing the weight returns this
dtype. The stored dtype differs from the compute dtype of the layer. The stored dtype comes from the checkpoint, and neither `dtype=` at
loading nor `.to()` changes it.

**Why it is bad.** The 4-bit layer of bitsandbytes casts the dequantized weight at every call, and each cast copies the whole weight. Other
code that dequantizes the weight, such as a fused LoRA kernel, gets the weight in one dtype and the activations in another. A matmul then
raises `expected m1 and m2 to have the same dtype, but got: c10::Half != c10::BFloat16`.

**An example that fails**

    weight = bitsandbytes.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)   # float16, as saved
    hidden @ weight.t()                                                                     # bfloat16 activations

**Repaired**

    layer.weight.quant_state.dtype = torch.bfloat16

**How safe is the fix?** The fix is safe, because it changes only the dtype of the dequantized weight. The packed codes and their float32
scales do not change.

**Seen in** unslothai/unsloth #4005, #4918; huggingface/diffusers #11270.
"""

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import agree, named
from isotype.records.finding import Finding
from isotype.records.trace import Trace, Weight
from isotype.rules.kit.findings import Findings, finding_of, fix
from isotype.rules.kit.weight_sets import counted, modules, quantized


def find(trace: Trace) -> Findings:
    stale: dict[tuple[torch.dtype, torch.dtype], list[Weight]] = {}
    for weight, state in quantized(trace):
        # IST404 reports layers with the compute dtype float32, and layers whose state has the model's dtype.
        right = state.state in (None, state.compute, trace.setup.compute)
        if state.state is not None and state.compute in HALVES and not right:
            stale.setdefault((state.state, state.compute), []).append(weight)
    for (dtype, compute), weights in stale.items():
        yield _finding(trace, dtype, compute, weights)


def _finding(trace: Trace, state: torch.dtype, compute: torch.dtype, weights: list[Weight]) -> Finding:
    paths = [[s for operand in call.operands for s in operand.origin.path()] for call in trace.breaches()]
    crashes = sum(any(step.kind == "state" or "dequantize" in step.name for step in path) for path in paths)
    was, wanted = dtype_name(state), dtype_name(compute)
    effect = "the layers cast each dequantized weight; other code that dequantizes these weights would fail"
    if crashes:
        effect = f"{agree(crashes, 'operator', 'fail')} on a dequantized weight"
    to_compute = f"set the dtype of the quantization states to {wanted}"
    return finding_of(
        "error" if crashes else "warning",
        f"{counted(weights, '4-bit weight', 'dequantize')} to {was}, but the layers compute in {wanted}",
        weights,
        cause=f"the quantization state of {named(weights[0].module)} has the dtype {was}{weights[0].by_line}",
        notes=(effect,),
        fixes=(fix(to_compute, "state", modules(weights), wanted),),
    )
