"""
**What it means.** The scales (absmax) of a quantized layer are not float32: a cast of the whole model, or of its state dict,
reached them.

**Why it is bad.** Each scale multiplies a block of 64 weights. bfloat16 keeps 8 bits of it, an error of up to 0.4 % in every
weight of the block; CUDA kernels read the bytes as float32 and return noise.

**An example that costs**

    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}

**Repaired**

    load the model again; cast what is left of a state dict after names that end in absmax

**How safe is the fix?** Digits that were rounded away come back only from the checkpoint.

**Seen in** bitsandbytes 0.50 itself: its layout for CPUs with AVX512-BF16, which the first evaluation forward packs, rounds the
scales to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import named
from isotype.rules.finding import Finding
from isotype.rules.kit.fixes import advice
from isotype.rules.kit.weight_sets import count, finding_of
from isotype.trace.record import Trace, Weight

TITLE = "Quantization scales that are not float32"


def find(trace: Trace) -> Iterator[Finding]:
    """Float scales in a dtype other than float32."""
    rounded = [weight for weight in trace.weights if _absmax(weight) not in (None, torch.float32)]
    if rounded:
        dtype = _absmax(rounded[0])
        assert dtype is not None
        yield finding_of(
            "IST405",
            "warning" if trace.setup.profile.kind == "cpu" else "error",
            f"the scales of {count(rounded)} quantized weights are {dtype_name(dtype)}",
            rounded,
            phase="load",
            cause=f"the scales of {named(rounded[0].module)} were cast to {dtype_name(dtype)}",
            fixes=(advice(rounded[0].module, "load the model again and keep every absmax in float32"),),
        )


def _absmax(weight: Weight) -> torch.dtype | None:
    kept = weight.quantization
    if kept is None or kept.absmax is None or not kept.absmax.is_floating_point:
        return None
    return kept.absmax
