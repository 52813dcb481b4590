"""Costs of findings that raise no error (rules IST2xx and IST6xx): FLOPs, casts, bytes and estimated time.

The roofline model (Williams, Waterman, Patterson, CACM 52(4), 2009) estimates the time of an operator as the longer of
two times. The first time is its FLOPs divided by the peak rate of its dtype. The second time is its bytes divided by
the memory bandwidth. The time of a step is the sum of the times of its operators, without fusion and launch costs. For
tiny models, the estimates are too small, because launches take most of the time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from isotype.compat.glibc import LARGEST_KEPT
from isotype.compat.torch import operator_schema
from isotype.core import operators
from isotype.core.dtypes import FLOATS, HALVES
from isotype.records.finding import Cost
from isotype.records.memory import Products, StepTime
from isotype.records.trace import CAST_FUNCTIONS, Call, Operand, Origin, Trace, Weight
from isotype.rules.kit.groups import per_trace

_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_UNWRITTEN = tuple(f"aten.{name}." for name in _EMPTY)
"""Prefixes of the names of operators that return memory, but do not write to the memory."""
_CASTS = ("aten._to_copy.", "prims.convert_element_type.")


@dataclass(frozen=True)
class Cast:
    """A cast between float dtypes. `elements` is the number of cast elements in all `call.repeats` equal calls."""

    call: Call
    operand: Operand
    before: torch.dtype
    after: torch.dtype
    elements: int

    @property
    def widens(self) -> bool:
        """True if the result takes more bytes per element than the operand."""
        return self.after.itemsize > self.before.itemsize

    @property
    def bytes(self) -> int:
        return self.elements * (self.before.itemsize + self.after.itemsize)


@per_trace
def casts(trace: Trace) -> tuple[Cast, ...]:
    casts = []
    for call in trace.calls:
        if call.op.startswith(_CASTS) and len(call.operands) == 1 and call.results:
            operand, (after, shape) = call.operands[0], call.results[0]
            if operand.dtype != after and {operand.dtype, after} <= FLOATS:
                casts.append(Cast(call, operand, operand.dtype, after, math.prod(shape) * call.repeats))
    return tuple(casts)


def by_autocast(origin: Origin) -> bool:
    """Return True if autocast made a cast, and False if a call such as `.to()` or `.float()` made the cast."""
    return origin.kind == "autocast" or (origin.kind == "cast" and origin.name not in CAST_FUNCTIONS)


def root(origin: Origin) -> Origin:
    """Return the origin that causes a wide dtype.

    The origin is `Origin.cause`, with one exception: a quantized layer or an adapter may cast a wide input to a
    narrower dtype and its output back to the wide dtype. In this case, the origin of the input is returned.
    """
    blamed = origin.cause
    while blamed.kind in ("cast", "autocast"):
        casts = (s for s in blamed.path()[1:] if s.kind in ("cast", "autocast") and s.module == blamed.module)
        down = next((s for s in casts if s.dtype.itemsize < blamed.dtype.itemsize), None)
        if down is None or down.before is None or down.before.dtype != blamed.dtype:
            return blamed
        blamed = down.before.cause
    return blamed


@cache
def is_view(op: str) -> bool:
    """Return True if an operator returns a view of its operand and moves no bytes."""
    operator = _operator(op)
    return op.startswith("prim.") or (operator is not None and operators.is_view(operator))


@cache
def allocates(op: str) -> bool:
    """Return True if an operator allocates memory for its results. Views and in-place operators do not."""
    operator = _operator(op)
    written = operator is not None and any(value.alias_info for value in operator_schema(operator).returns)
    return not written and not is_view(op)


def _operator(op: str) -> Any:
    """Return the operator with this name; None for a function, or an operator without a schema."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    packet: Any = getattr(getattr(torch.ops, namespace, None), name, None)
    operator: Any = getattr(packet, overload or "default", None)
    return operator if operator_schema(operator) is not None else None


def bytes_moved(call: Call) -> int:
    """Return the bytes that all `call.repeats` equal calls read and write; 0 for views and for `empty` tensors."""
    if is_view(call.op) or call.op.startswith(_UNWRITTEN):
        return 0
    read = sum(math.prod(operand.shape) * operand.dtype.itemsize for operand in call.operands)
    written = sum(math.prod(shape) * dtype.itemsize for dtype, shape in call.results)
    return (read + written) * call.repeats


def new_pages(call: Call) -> int:
    """Return the bytes of results that need new memory pages from malloc, in all `call.repeats` equal calls."""
    if not allocates(call.op):
        return 0
    sizes = (math.prod(shape) * dtype.itemsize for dtype, shape in call.results)
    return sum(size for size in sizes if size > LARGEST_KEPT) * call.repeats


def seconds(call: Call, rates: Mapping[torch.dtype, float], bandwidth: float) -> float:
    """Return the time of all `call.repeats` equal calls by the roofline model, in seconds.

    The unit of `rates` is FLOP/s, and the unit of `bandwidth` is bytes/s. If `rates` has no rate for a dtype, only
    the bytes count.
    """
    dtype, memory = call.run_dtype, bytes_moved(call) / bandwidth
    rate = None if dtype is None else rates.get(dtype)
    return max(call.flops * call.repeats / rate, memory) if rate else memory


def slowdown(
    trace: Trace,
    costly: Iterable[Call],
    wanted: torch.dtype,
    gone: Iterable[Call] = (),
    stand_in: torch.dtype | None = None,
) -> float | None:
    """Return the time of the step divided by the time of a changed step, by the roofline model; None if a rate is
    missing.

    The changed step does not run the calls in `gone`, and runs the calls in `costly` in the dtype `wanted`. A call in
    a narrower dtype moves fewer bytes. A dtype without a published rate gets the rate of the dtype `stand_in`.
    """
    rates, bandwidth = trace.setup.profile.rates, trace.setup.profile.memory_bandwidth
    costly = list(costly)
    rated = {None, *rates} if stand_in is None else {None, *FLOATS}
    if bandwidth is None or wanted not in rates or any(call.run_dtype not in rated for call in costly):
        return None
    if stand_in is not None and stand_in in rates:
        rates = {**dict.fromkeys(FLOATS, rates[stand_in]), **rates}
    total = sum(seconds(call, rates, bandwidth) for call in trace.calls)
    saved = sum(seconds(call, rates, bandwidth) for call in gone)
    for call in costly:
        widest = max((dtype.itemsize for dtype in call.dtypes & FLOATS), default=wanted.itemsize)
        memory = bytes_moved(call) * min(1.0, wanted.itemsize / widest) / bandwidth
        faster = max(call.flops * call.repeats / rates[wanted], memory)
        saved += seconds(call, rates, bandwidth) - faster
    return total / (total - saved) if 0 < saved < total else 1.0


@per_trace
def all_bytes(trace: Trace) -> int:
    return sum(map(bytes_moved, trace.calls))


def flops_share(trace: Trace, calls: Iterable[Call]) -> float:
    """Return the share (0 to 1) of the step's FLOPs in these calls."""
    return sum(call.flops * call.repeats for call in calls) / max(1, sum(trace.flops.values()))


def estimate(cost: Cost, trace: Trace) -> tuple[str, ...]:
    """Return a note with the estimated slowdown and the source of the rates; no note for a slowdown below 0.5 %."""
    if cost.slowdown is None or cost.slowdown < 1.005:
        return ()
    title = trace.setup.profile.title
    return (
        f"about {cost.slowdown:.2f} times the step time on {title}, estimated from its data-sheet rates (roofline)",
    )


_RANDOM = ("aten.bernoulli", "aten.native_dropout", "aten.rand", "aten.uniform_", "aten.normal_")
_ATTENTION = (
    "_scaled_dot_product_", ".scaled_dot_product_attention", "._flash_attention", "._efficient_attention",
    "._varlen_attn",
)  # fmt: skip


@per_trace
def step_time(trace: Trace) -> StepTime | None:
    """Return the minimum time of a step; None if the profile has no rates, or if the trace ended early."""
    profile = trace.setup.profile
    known = torch.float32 in profile.rates
    emulated = {d: torch.float32 for d in HALVES if known and profile.supports(d) == "emulated"}
    rates = {dtype: profile.rates[other] for dtype, other in emulated.items()}
    peaks, bandwidth, steps = {**rates, **profile.rates}, profile.memory_bandwidth, profile.steps
    rated = bandwidth is not None and trace.flops and trace.flops.keys() <= peaks.keys()
    if not rated or bandwidth is None or trace.failure is not None:
        return None
    seconds, traced, host, moved, launches = 0.0, 0.0, 0.0, 0, 0
    flops: dict[torch.dtype, float] = {}
    for call in trace.calls:
        traffic, dtype = traffic_of(trace, call), call.run_dtype
        least = traffic / bandwidth
        if dtype is not None:
            count = least_flops(call)
            flops[dtype] = flops.get(dtype, 0) + count
            least = max(least, count / peaks[dtype])
            seconds += least
        if profile.random_rate is not None and call.op.startswith(_RANDOM) and call.results:
            least = max(least, math.prod(call.results[0][1]) * call.repeats / profile.random_rate)
        if profile.page_rate is not None:
            least += new_pages(call) / profile.page_rate
        traced += least
        moved += traffic
        launches += call.repeats if traffic else 0
        host += steps.launch * call.repeats if steps is not None and traffic else 0
    if not seconds:
        return None
    ids = trace.setup.batch.get("input_ids")
    tokens = None if ids is None else math.prod(ids)
    products = {
        dtype: Products(count, peaks[dtype], None if dtype in profile.rates else emulated[dtype])
        for dtype, count in flops.items()
    }
    return StepTime(seconds, max(traced, host), products, moved, bandwidth, launches, tokens, host)


def traffic_of(trace: Trace, call: Call) -> int:
    """Return the bytes that a call moves. For a call of an optimizer, add the bytes for layers that are not traced."""
    size = bytes_moved(call)
    return round(size * _folded(trace)) if call.phase == "optimizer" else size


@per_trace
def _folded(trace: Trace) -> float:
    """Return the number of trained elements in all layers, divided by the number in the traced layers."""
    sizes = [(math.prod(weight.shape), weight.repeats) for weight in trace.weights if weight.trainable]
    return sum(size * repeats for size, repeats in sizes) / max(1, sum(size for size, _ in sizes)) or 1.0


def least_flops(call: Call) -> float:
    """Return the FLOPs of `call` and of the equal calls that it represents. Attention counts half, as with a causal mask."""
    count = call.flops * call.repeats
    return count / 2 if any(kernel in call.op for kernel in _ATTENTION) else count


def dense_stacks(trace: Trace) -> tuple[list[Weight], int]:
    """Return the frozen weights of stacked experts that have a float dtype, and their bytes in all layers."""
    frozen = (weight for weight in trace.weights if not (weight.trainable or weight.buffer))
    stacks = [weight for weight in frozen if len(weight.shape) == 3 and weight.dtype.is_floating_point]
    return stacks, sum(weight.bytes * weight.repeats for weight in stacks)
