"""A parameter in 16 bits that its author keeps in float32

**What it means.** A parameter is 16-bit, but the author of the model keeps it in float32 (`_keep_in_fp32_modules`). Examples are T5's `wo`,
routers and some norms. `from_pretrained(dtype=torch.float16)` keeps these parameters in float32, but `.half()` and `.to(dtype)` do not.

**Why it is bad.** The author keeps a parameter in float32 because the model fails otherwise. For example, T5's `wo` overflows in float16,
and the loss is NaN.

**An example that fails**

    model = T5ForConditionalGeneration(config).half()

**Repaired**

    T5ForConditionalGeneration.from_pretrained(path, dtype=torch.float16)

**How safe is the fix?** The fix is safe: it keeps the parameter in float32, as the author requires. A cast does not restore digits that
were rounded away, so load the checkpoint again.

**Seen in** huggingface/transformers #5651.
"""

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.records.finding import Fix
from isotype.records.trace import Trace, Weight
from isotype.rules.kit.findings import Findings, advice, finding_of
from isotype.rules.kit.weight_sets import borders, casts, counted


def find(trace: Trace) -> Findings:
    for dtype in HALVES:
        of_model = (w for w in trace.weights if not w.adapter and not w.quantization)
        rounded = [weight for weight in of_model if weight.pinned and weight.dtype == dtype]
        if rounded:
            yield finding_of(
                "warning" if dtype == torch.float16 else "note",
                f"{counted(rounded, 'parameter', 'are')} {dtype_name(dtype)}; the model's author requires float32",
                rounded,
                phase="load",
                notes=("only the checkpoint still has the digits that were rounded away",),
                fixes=_fixes(trace, rounded),
            )


def _fixes(trace: Trace, rounded: list[Weight]) -> tuple[Fix, ...]:
    cast, keep = casts(rounded, torch.float32), "keep these parameters in float32"
    with_borders = (*cast, *borders(rounded, trace.setup.compute))
    how = "load with from_pretrained(dtype=…), which keeps these parameters in float32, and do not cast the model afterwards"
    return (
        Fix(keep, "safe", actions=cast),
        Fix(f"{keep} and cast the inputs and outputs of their modules", "safe", actions=with_borders),
        advice("dtype", how),
    )
