"""The minimum time of a step on a device by its data sheet, and its parts.

The roofline of `costs` as a bound: a product takes at least its FLOPs at its dtype's peak rate, and its
operands and results at the memory's bandwidth. Attention counts half of its FLOPs, since a causal kernel
skips the scores above the diagonal. Operators between products can be fused into fewer kernels than traced,
so they are in no bound, but in the time of the traced step. No card reaches these rates. On a measured
device, random values take the time of one thread to draw them: on a CPU, ten times that of their bytes.
Blocks that the C library does not cache come in new pages, which the system zeroes: ten times the time of
their bytes. An emulated 16-bit dtype is converted and multiplied in float32 units: at most at float32's rate.
The host's time per launch is on no data sheet; its maximum before the device waits follows from the rest.
With step-level rates (`DeviceProfile.steps`), operators between products take the traffic and launches that
remain after fusion, and a step takes at least the host's time for its launches.
"""

from __future__ import annotations

import torch

from isotype.records.memory import Products, StepTime
from isotype.records.trace import Call, Trace
from isotype.rules.kit import costs
from isotype.rules.kit.groups import per_trace

_RANDOM = ("aten.bernoulli", "aten.native_dropout", "aten.rand", "aten.uniform_", "aten.normal_")
_ATTENTION = (
    "_scaled_dot_product_",
    ".scaled_dot_product_attention",
    "._flash_attention",
    "._efficient_attention",
    "._varlen_attn",
)


@per_trace
def step_time(trace: Trace) -> StepTime | None:
    """Return the minimum time of a step; None without rates, or if the step was not traced to its end."""
    profile = trace.setup.profile
    emulated = {
        dtype: torch.float32
        for dtype in (torch.bfloat16, torch.float16)
        if profile.supports(dtype) == "emulated" and torch.float32 in profile.peak_flops
    }
    rates = {dtype: profile.peak_flops[other] for dtype, other in emulated.items()}
    peaks, bandwidth, steps = {**rates, **profile.peak_flops}, profile.memory_bandwidth, profile.steps
    rated = bandwidth is not None and trace.flops and trace.flops.keys() <= peaks.keys()
    if not rated or bandwidth is None or trace.failure is not None:
        return None
    seconds, traced, host, moved, launches = 0.0, 0.0, 0.0, 0, 0
    flops: dict[torch.dtype, float] = {}
    for call in trace.calls:
        traffic, dtype = traffic_of(trace, call), costs.run_dtype(call)
        left = steps.between if steps is not None and fuses(call) else 1.0
        least = left * traffic / bandwidth
        if dtype is not None:
            count = least_flops(call)
            flops[dtype] = flops.get(dtype, 0) + count
            least = max(least, count / peaks[dtype])
            seconds += least
        if profile.random_rate is not None and call.op.startswith(_RANDOM):
            least = max(least, _values(call) / profile.random_rate)
        if profile.page_rate is not None:
            least += costs.new_pages(call) / profile.page_rate
        traced += least
        moved += traffic
        launches += call.repeats if traffic else 0
        host += steps.launch * call.repeats * left if steps is not None and traffic else 0
    if not seconds:
        return None
    products = {
        dtype: Products(count, peaks[dtype], None if dtype in profile.peak_flops else emulated[dtype])
        for dtype, count in flops.items()
    }
    return StepTime(seconds, max(traced, host), products, moved, bandwidth, launches, _tokens(trace), host)


def traffic_of(trace: Trace, call: Call) -> int:
    """Return the bytes read and written by the represented calls; an optimizer's call updates all layers' weights."""
    size = costs.bytes_moved(call)
    return round(size * _folded(trace)) if call.phase == "optimizer" else size


@per_trace
def _folded(trace: Trace) -> float:
    """Return the whole model's trained weights over those of the folded model."""
    sizes = [(costs.elements(weight.shape), weight.repeats) for weight in trace.weights if weight.trainable]
    return sum(size * repeats for size, repeats in sizes) / max(1, sum(size for size, _ in sizes)) or 1.0


def fuses(call: Call) -> bool:
    """Return whether kernels fuse a call with its neighbours: no product, dequantization, optimizer or other
    library's operator.
    """
    dequantizes = any(operand.dtype == torch.int8 for operand in call.operands)
    return not call.flops and not dequantizes and call.phase != "optimizer" and call.op.startswith("aten.")


def _values(call: Call) -> int:
    """Return the number of random values that the calls draw: those of the first result."""
    return costs.elements(call.results[0][1]) * call.repeats if call.results else 0


def least_flops(call: Call) -> float:
    """Return the FLOPs of the represented calls; half for attention."""
    count = call.flops * call.repeats
    return count / 2 if any(kernel in call.op for kernel in _ATTENTION) else count


def _tokens(trace: Trace) -> int | None:
    shape = trace.setup.batch.get("input_ids")
    return costs.elements(shape) if shape is not None else None
