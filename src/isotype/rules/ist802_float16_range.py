"""Values beyond float16's range

**What it means.** The largest number of float16 is 65504. The finding describes one of these problems:

- A weight is infinite, or would become infinite in float16.
- The weight of a norm is so large that the output of the norm can exceed 65504. A norm of width n can return its weight times sqrt(n).
- Code fills a mask with the lowest float32 number, and casts the mask to float16. The cast turns this number into minus infinity, and the
  softmax of a completely masked row (left padding) is NaN.

**Why it is bad.** The next norm or softmax turns infinity into NaN. The loss is then NaN, or sampling stops with `probability tensor
contains either inf, nan or element < 0`.

**An example that fails**

    model = AutoModelForCausalLM.from_pretrained("google/gemma-3-4b-it", dtype=torch.float16)

**Repaired**

    AutoModelForCausalLM.from_pretrained("google/gemma-3-4b-it", dtype=torch.bfloat16)    # or float32

**How safe is the fix?** bfloat16 and float32 are safe, because they represent such values. bfloat16 has only 8 significant bits. A mask
that is filled with `torch.finfo(dtype).min` hides the same positions. Infinite weights have to be loaded again.

**Seen in** huggingface/transformers #39972, #5651; JIA-Lab-research/LongLoRA #165; facebookresearch/metaseq #254;
axolotl-ai-cloud/axolotl #902; google/gemma_pytorch #24.
"""

import math
from dataclasses import replace

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import grouped, plural, short
from isotype.precision.ranges import FLOAT16_LARGEST
from isotype.records.trace import Trace, Weight
from isotype.rules.kit.contract_rule import with_groups
from isotype.rules.kit.findings import Findings, advice, finding_at, finding_of, fix
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.weight_sets import counted
from isotype.rules.kit.words import at

_HEADLINE = "a number beyond the range of {given} is written into a {given} tensor"
CLAIMS = (Claim("value", lambda broken: "without overflow" in broken.call.refusal, _HEADLINE, settled=False),)
_FINITE = "write torch.finfo(tensor.dtype).min, where `tensor` is the filled tensor"


def find(trace: Trace) -> Findings:
    for group, finding in with_groups(__name__, trace):
        source, dtype = finding.source, group.mismatched.dtype
        number = max((value for _, value in group.calls[0].numbers), key=abs)
        where = at(source)
        cause = f"the number {number:g}{where} is beyond {torch.finfo(dtype).max:g}, the largest number of {dtype_name(dtype)}"
        wide = [fix(f"fill a float32 tensor{where}", "line", (source,), "float32")] if source else []
        yield replace(finding, cause=cause, fixes=(*wide, *finding.fixes, advice(source, _FINITE)))
    yield from _emptied_rows(trace)
    # Packed codes may have a float dtype (`quant_storage`). Their bits are no numbers.
    dense = (weight for weight in trace.weights if weight.quantization is None)
    infinite = [
        w for w in dense if not (w.emptied_at or math.isfinite(_largest(w)))
    ]  # IST504 names emptied weights
    if infinite:
        how = "load, merge or compute the weight again in a wider dtype, in which all numbers are finite"
        message = f"{counted(infinite, 'weight', 'hold')} values that are not finite"
        cause = f"{infinite[0].name} holds {infinite[0].largest}"
        fixes = (advice(infinite[0].name, how),)
        yield finding_of("error", message, infinite, phase="load", cause=cause, fixes=fixes)
    if torch.float16 not in (trace.setup.autocast, trace.setup.compute):
        return
    other = "bfloat16" if torch.bfloat16 in trace.setup.profile.native else "float32"
    too_large = [w for w in trace.weights if w.kind == "linear" and FLOAT16_LARGEST < _largest(w) < math.inf]
    if too_large:
        yield finding_of(
            "error",
            f"{counted(too_large, 'weight', 'become')} infinite in float16",
            too_large,
            cause=f"{too_large[0].name} reaches {_largest(too_large[0]):.3g}",
            fixes=(advice("dtype", f"compute in {other}"),),
        )
    norms = [w for w in trace.weights if w.kind == "norm" and FLOAT16_LARGEST < _bound(w) < math.inf]
    if norms:
        worst = max(norms, key=_bound)
        product = f"{_largest(worst):.3g} x sqrt({worst.shape[-1]})"
        yield finding_of(
            "warning",
            f"{counted(norms, 'norm', 'can')} return values beyond 65504, the largest number of float16",
            norms,
            cause=f"{norms[0].name} reaches {_largest(norms[0]):.3g}",
            notes=(f"{worst.name}: up to {product} = {_bound(worst):.3g}",),
            fixes=(advice("dtype", f"load the model and compute in {other}"),),
        )


def _emptied_rows(trace: Trace) -> Findings:
    """Yield a finding for each cast that turns all values of a mask's row into minus infinity.

    For a completely masked row, torch's fused attention returns zeros, and a plain softmax returns NaN.
    """
    if not any(call.op.startswith("aten._softmax.") for call in trace.calls):
        return
    emptied = (call for call in trace.calls if call.emptied and call.phase == "forward")
    for source, calls in grouped(emptied, lambda call: call.source).items():
        yield finding_at(
            "error",
            f"a cast to float16 fills {plural(calls[0].emptied, 'whole row')} of a mask with minus infinity: softmax returns NaN",
            calls,
            cause=f"the cast at {short(source) or 'an unknown line'} gets a fill value below -65504, the lowest number of float16",
            fixes=(advice(source, "fill the mask after the cast, with torch.finfo(torch.float16).min"),),
        )


def _largest(weight: Weight) -> float:
    return weight.largest or 0.0


def _bound(weight: Weight) -> float:
    """Return the largest value that a norm of width n can return: its largest weight times sqrt(n)."""
    return _largest(weight) * math.sqrt(weight.shape[-1]) if weight.shape else 0.0
