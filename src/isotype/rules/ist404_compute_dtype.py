"""4-bit layers that compute in another dtype than the model

**What it means.** 4-bit layers compute in another dtype than the rest of the model. This dtype is mostly float32.
`BitsAndBytesConfig(load_in_4bit=True)` sets the compute dtype of the layers to float32, and bitsandbytes gives no warning. If no compute
dtype is set, a layer computes in the dtype of its first input, which may be float32.

**Why it is bad.** The layer casts its input to float32, dequantizes its weight to float32, and casts the product to 16 bits. On GPUs, such
a layer is several times slower, and float32 adds no digits to 4-bit codes.

**An example that costs**

    BitsAndBytesConfig(load_in_4bit=True)

**Repaired**

    BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)

**How safe is the fix?** The fix is safe: it rounds the results of the layer to 16 bits, like the results of all other layers. The packed
codes and their scales do not change.

**Seen in** bitsandbytes-foundation/bitsandbytes #2077, #1623; h2oai/h2ogpt #682; bigcode-project/bigcode-evaluation-harness #192;
huggingface/alignment-handbook #107.
"""

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import named
from isotype.records.finding import Cost, Fix
from isotype.records.trace import Quantization, Trace, Weight
from isotype.rules.kit import costs
from isotype.rules.kit.findings import Findings, actions, finding_of
from isotype.rules.kit.weight_sets import counted, main_dtype, modules, quantized


def find(trace: Trace) -> Findings:
    wanted = _activations(trace)
    others = _in_other_dtype(trace, wanted)
    if wanted is None or not others:
        return
    layers, compute = [weight for weight, _ in others], others[0][1].compute
    inside = {weight.module for weight in layers}
    wide = [c for c in trace.calls if c.module in inside and c.run_dtype == torch.float32]
    narrow = compute == torch.float16 and not trace.setup.scaler
    target, name = dtype_name(wanted), dtype_name(compute or torch.float32)
    # The fix also changes the dtype of the states. Otherwise, IST401 reports them next.
    stale = modules(weight for weight, state in others if state.state not in (None, wanted))
    changes = (*actions("compute", modules(layers), target), *actions("state", stale, target))
    set_to = name if compute else "unset, and the layer's first input is float32"
    yield finding_of(
        "warning",
        f"{counted(layers, '4-bit layer', 'compute')} in {name}, but the model runs in {target}",
        layers,
        cause=f"{named(layers[0].module)}: the compute dtype is {set_to}{layers[0].by_line}",
        notes=("without loss scaling, gradients below 6e-8 become zero in float16",) if narrow else (),
        cost=Cost(flops_share=costs.flops_share(trace, wide)),
        fixes=(Fix(f"set the 4-bit layers' compute dtype to {target}", "safe", actions=changes),),
    )


def layers_in(trace: Trace, dtype: torch.dtype) -> frozenset[str]:
    """Return the 4-bit layers that compute in `dtype` while the model runs in another dtype."""
    others = _in_other_dtype(trace, _activations(trace))
    return frozenset(weight.module for weight, state in others if state.compute == dtype)


def _in_other_dtype(trace: Trace, wanted: torch.dtype | None) -> list[tuple[Weight, Quantization]]:
    """Return the 4-bit layers that compute in another dtype than `wanted`; none if `wanted` is not a 16-bit dtype."""
    # An unset compute dtype becomes the dtype of the first input. That is right unless the plain weights are float32.
    right = (wanted,) if _plain(trace) == torch.float32 else (wanted, None)
    layers = ((weight, state) for weight, state in quantized(trace) if state.format != "int8")
    return [(weight, state) for weight, state in layers if wanted in HALVES and state.compute not in right]


def _activations(trace: Trace) -> torch.dtype | None:
    setup = trace.setup
    return setup.policy.compute if setup.policy is not None else setup.autocast or _plain(trace)


def _plain(trace: Trace) -> torch.dtype | None:
    plain = (w for w in trace.weights if not (w.buffer or w.adapter or w.quantization))
    return main_dtype(weight for weight in plain if weight.dtype.is_floating_point)
