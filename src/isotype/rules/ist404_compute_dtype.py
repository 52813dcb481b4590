"""
**What it means.** 4-bit layers compute in float32 while the model runs in 16 bit.
`BitsAndBytesConfig(load_in_4bit=True)` leaves the compute dtype at float32 and marks it as set, which
suppresses bitsandbytes' warning. A compute dtype not marked as set is taken from the first input instead.

**Why it is bad.** Every input is cast up, every weight is dequantized to float32 and multiplied there, every
output is cast down: several times slower on GPUs, without more digits in the 4-bit codes.

**An example that costs**

    BitsAndBytesConfig(load_in_4bit=True)

**Repaired**

    BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)

**How safe is the fix?** The products are rounded as in the other layers. Codes and scales are unchanged.

**Seen in** bitsandbytes-foundation/bitsandbytes #2077, #1623; h2oai/h2ogpt #682;
bigcode-project/bigcode-evaluation-harness #192; huggingface/alignment-handbook #107.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import agree, named
from isotype.records.finding import Cost, Finding, Fix
from isotype.records.trace import Trace, Weight
from isotype.rules.kit import costs
from isotype.rules.kit.weight_sets import HALVES, count, finding_of, main_dtype, modules, quantized
from isotype.rules.kit.words import actions

TITLE = "4-bit layers that compute in another dtype than the model"


def find(trace: Trace) -> Iterator[Finding]:
    """Yield 4-bit layers whose compute dtype is not the 16-bit activations', or is unset with float32 ones."""
    wanted = _activations(trace)
    wide = _wide(trace, wanted)
    if wanted is None or not wide:
        return
    inside = {weight.module for weight in wide}
    theirs = [c for c in trace.calls if c.module in inside and costs.run_dtype(c) == torch.float32]
    is_set = _compute(wide[0])
    theirs_in = dtype_name(is_set or torch.float32)
    yield finding_of(
        "IST404",
        "warning",
        f"{agree(count(wide), '4-bit layer', 'compute')} in {theirs_in}, the model runs in {dtype_name(wanted)}",
        wide,
        cause=f"{named(wide[0].module)}: the compute dtype is "
        + (theirs_in if is_set else "unset, its first input is float32"),
        notes=(_NARROW,) if is_set == torch.float16 and not trace.setup.scaler else (),
        cost=Cost(flops_share=costs.flops_share(trace, theirs)),
        fixes=(
            Fix(
                f"set the 4-bit layers' compute dtype to {dtype_name(wanted)}",
                "safe",
                actions=(
                    *actions("compute", modules(wide), dtype_name(wanted)),
                    *actions("state", modules(_stale(wide, wanted)), dtype_name(wanted)),
                ),
            ),
        ),
    )


_NARROW = "without loss scaling, gradients below 6e-8 become zero in float16"


def layers_in(trace: Trace, dtype: torch.dtype) -> frozenset[str]:
    """Return the 4-bit layers that compute in `dtype` while the model runs in another one."""
    return frozenset(w.module for w in _wide(trace, _activations(trace)) if _compute(w) == dtype)


def _wide(trace: Trace, wanted: torch.dtype | None) -> list[Weight]:
    if wanted not in HALVES:
        return []
    four_bit = [weight for weight, state in quantized(trace) if state.format != "int8"]
    # An unset compute dtype becomes that of the first input: right, unless the plain weights are float32.
    unset = _plain(trace) == torch.float32
    return [w for w in four_bit if _compute(w) not in (None, wanted) or (_compute(w) is None and unset)]


def _compute(weight: Weight) -> torch.dtype | None:
    assert weight.quantization is not None
    return weight.quantization.compute


def _stale(weights: Iterable[Weight], wanted: torch.dtype | None) -> list[Weight]:
    """Return the layers whose states would mismatch (IST401) after changing the compute dtype to `wanted`."""
    return [w for w in weights if w.quantization is not None and w.quantization.state not in (None, wanted)]


def _activations(trace: Trace) -> torch.dtype | None:
    """Return the dtype the model runs in: the policy's, autocast's, or that of its plain frozen weights."""
    setup = trace.setup
    return setup.policy.compute if setup.policy is not None else setup.autocast or _plain(trace)


def _plain(trace: Trace) -> torch.dtype | None:
    return main_dtype(
        weight
        for weight in trace.weights
        if not (weight.buffer or weight.adapter or weight.quantization) and weight.dtype.is_floating_point
    )
