"""float64 on a device without fast float64

**What it means.** The step computes in float64 on an Apple GPU or an Intel Arc A-series GPU, which do not support float64. The rule also
reports matmuls in float64 on a GPU with few float64 units: every GeForce and RTX card, T4, A10, L4, L40S, Radeon.

**Why it is bad.** Without support, the step crashes: "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support
float64. Please use float32 instead." On an Arc GPU: "Required aspect fp64 is not supported on the device". With few units, there is no
error, but float64 matmuls run 16 to 64 times slower than float32 matmuls.

**Why it happens.** The code computes rotary angles or time steps in float64 for more digits, calls `.double()`, or makes a tensor from
NumPy numbers, which are float64 by default. Some code then casts the model to the data's dtype. On Intel GPUs, a GradScaler inverts its
scale in float64.

**An example that fails**

    angles = torch.outer(positions, frequencies.double())        # on an Apple GPU

**Repaired**

    angles = torch.outer(positions, frequencies.float())

**What is not reported.** The rule ignores tensors without dimensions, because they stay on the CPU. It also ignores the code of
transformers and diffusers, which uses float32 on an Apple GPU. On GPUs with few float64 units, only matmuls count.

**How safe is the fix?** Writing float32 instead of float64 in the code is safe. Integers up to 16 million stay exact in float32, and other
numbers are rounded to 7 digits. A cast of a stored float64 weight or buffer is unsafe. Instead of a GradScaler, the fix uses bfloat16. This
fix is unsafe if frozen float16 weights have to be cast.

**Seen in** bghira/SimpleTuner #1523; huggingface/transformers #31060; tyfeld/MMaDA-Parallel #3; pytorch/pytorch #147731;
intel/torch-xpu-ops #1742.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from isotype.core.names import distinct_names, short, starred
from isotype.records.finding import ActionKind, Finding
from isotype.records.trace import FROM_NUMPY, Call, Origin, Trace
from isotype.rules.kit.findings import Findings, Fixes, advice, finding_at, fix
from isotype.rules.kit.slow_dtype import find as find_slow
from isotype.rules.kit.slow_dtype import step_in
from isotype.rules.kit.words import LIBRARIES, and_others, cause_text, device_error, more

_GIVEN = ("input", "parameter", "buffer", "attribute", "outside", "data")
_STORED: dict[str, ActionKind] = {"parameter": "parameter", "buffer": "buffer", "attribute": "buffer"}


def find(trace: Trace) -> Findings:
    profile = trace.setup.profile
    if torch.float64 not in profile.refused:
        yield from _slow(trace)
        return
    if trace.setup.scaler and profile.kind == "xpu":
        yield _scaler(trace)
    by_cause: dict[str, dict[str, tuple[Origin, Call]]] = {}
    for call in trace.calls:
        # The backward of a cast in the forward is not another cause.
        if call.phase in ("forward", "generate") and not any(part in call.source for part in LIBRARIES):
            for origin in _entries(call):
                key = origin.kind if origin.kind in _STORED else origin.source or starred(origin.name)
                by_cause.setdefault(key, {}).setdefault(origin.name, (origin, call))
    for entries in by_cause.values():
        origins, calls = zip(*entries.values(), strict=True)
        yield _finding(trace, origins, calls)


def _slow(trace: Trace) -> Iterator[Finding]:
    """Yield the finding for matmuls in float64 on a GPU that has few float64 units."""
    stored = any(weight.dtype == torch.float64 and not weight.buffer for weight in trace.weights)
    products = (c for c in trace.calls if c.run_dtype == torch.float64 and c.phase in ("forward", "generate"))
    wide = (operand.origin for call in products for operand in call.floats if operand.dtype == torch.float64)
    causes = list(dict.fromkeys(origin.cause for origin in wide))
    for finding in find_slow(trace, torch.float64, torch.float32):
        if causes and not stored:
            cause = cause_text(causes[0], trace.owners)
            yield replace(finding, cause=cause, fixes=tuple(_fixes(causes)))
        else:
            yield finding


def _scaler(trace: Trace) -> Finding:
    """Return the finding for a GradScaler, which inverts its scale in float64 (torch/amp/grad_scaler.py, torch 2.13)."""
    return Finding(
        "error",
        f"a GradScaler computes in float64, which {trace.setup.profile.title} does not have",
        op="GradScaler.unscale_",
        phase="unscale",
        cause="GradScaler.unscale_ converts its scale to float64",
        notes=device_error("Required aspect fp64 is not supported on the device"),
        fixes=(step_in(trace, torch.float16, torch.bfloat16),),
    )


def _entries(call: Call) -> Iterator[Origin]:
    """Yield the weights and inputs that pass float64 to a call, or the call if only its result is float64."""
    wide = [operand for operand in call.operands if operand.dtype == torch.float64]
    for operand in wide:
        origin = operand.origin
        # A number is no operand of the GPU. A buffer is one, because `model.to("mps")` moves it.
        if origin.kind in _STORED or (operand.shape and (origin.kind in _GIVEN or origin.name == FROM_NUMPY)):
            yield origin
    if not wide and any(dtype == torch.float64 and shape for dtype, shape in call.results):
        yield Origin("constant", torch.float64, call.op.split(".")[1], call.module, call.source)


def _finding(trace: Trace, origins: Sequence[Origin], calls: Sequence[Call]) -> Finding:
    profile, others = trace.setup.profile, more(len(origins) - 1, origins[0].kind, " in float64")
    return finding_at(
        "error",
        f"{profile.title} has no float64",
        calls,
        cause=cause_text(origins[0], trace.owners),
        notes=(*others, profile.reason(torch.float64)),
        fixes=tuple(_fixes(origins)),
    )


def _fixes(origins: Sequence[Origin]) -> Fixes:
    first = origins[0]
    if first.kind == "input":
        yield advice(first.name, f"cast {first.name} to float32 before it goes to the device")
    elif first.kind in _STORED:
        names = distinct_names(origin.name for origin in origins)
        yield fix(f"cast {and_others(names)} to float32", _STORED[first.kind], names, "float32", safe=False)
    elif first.source:
        where = short(first.source)
        yield fix(f"write float32 instead of float64 at {where}", "line", (first.source,), "float32")
