"""Measured values that a step holds in float16: a trace joined with a measurement of the same model.

Magnitudes do not depend on a step's dtypes unless something overflows. So one measurement serves every trace
of the model, including that of a fix.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from isotype.core.names import base_name, starred
from isotype.precision.ranges import (
    FLOAT16_LARGEST,
    ModuleRange,
    OperatorRange,
    Ranges,
    is_attention,
    is_fill,
)
from isotype.records.trace import FLOATS, Call, Operand, Trace
from isotype.rules.kit.groups import per_trace

_CAST = "aten._to_copy.default"

_Key = tuple[str, str, str]


@dataclass(frozen=True)
class Held:
    """A value held in float16 in a step.

    Attributes:
        call: the operator of the trace; in a folded trace it may represent those of several layers.
        operator: its measurement, in its own layer.
        at: position of the measured operator in program order; a cast of its result is half a step later.
        value: the largest magnitude of its float16 operands or results.
        takes: whether that is an operand instead of the result.
    """

    call: Call
    operator: OperatorRange
    at: float
    value: float
    takes: bool

    @property
    def module(self) -> str:
        """Fully qualified name of the module: the call's if it is the measured layer itself."""
        same = base_name(self.call.module) == self.operator.module
        return self.call.module if same else self.operator.module

    @property
    def headroom(self) -> float:
        """float16's largest number over the value."""
        return FLOAT16_LARGEST / self.value if self.value else math.inf


def computes_float16(trace: Trace) -> bool:
    """Return whether an operator of the step has float16 operands or results."""
    return any(torch.float16 in _dtypes(call) for call in trace.calls)


def largest(trace: Trace) -> Held | None:
    """Return the largest measured value that the forward holds in float16; None if unknown."""
    forward = (each for each in held(trace) if each.call.phase == "forward")
    return max(forward, key=lambda each: each.value, default=None)


@per_trace
def held(trace: Trace) -> tuple[Held, ...]:
    """Return every measured value that the step holds in float16, in program order; none without a measurement."""
    ranges = trace.setup.ranges
    if ranges is None:
        return ()
    values = []
    measured = _measured(ranges)
    away = _folded_away(trace, measured)
    exceptions = _exceptions(trace)
    casts = _casts(trace)
    weights = {each.name: each.weight for each in ranges.modules}
    for (module, op, phase), calls in _calls(trace).items():
        others = away.get(starred(module), ()) if calls[0].repeats > 1 else ()
        alike = (each for each in others if exceptions.get(each) == exceptions.get(module))
        for layer in (module, *alike):
            operators = measured.get((layer, op, phase)) or _by_module(ranges, layer, calls[0])
            for call, (at, operator) in _matched(calls, operators):
                value = _value(call, operator, trace.by_ranges.get(module, 0), weights.get(layer, 0.0))
                if value is not None:
                    values.append(Held(call, operator, at, *value))
                elif id(call) in casts and not is_fill(operator.output):
                    values.append(Held(casts[id(call)], operator, at + 0.5, operator.output, False))
    return tuple(sorted(values, key=lambda each: each.at))


@dataclass(frozen=True)
class Flushed:
    """Shares (0 to 1) of the elements of a step's float16 gradients that become zero.

    Attributes:
        plain: without loss scaling.
        scaled: at a loss scale of 65536.
        gradient: the largest finite gradient; 0 if there is none.
    """

    plain: float
    scaled: float
    gradient: float


@per_trace
def flushed(trace: Trace) -> Flushed | None:
    """Return the share of gradients that float16 flushes to zero in the backward; None without a measurement."""
    gradients = [
        each
        for each in held(trace)
        if each.call.phase == "backward" and each.call.results[0][0] == torch.float16
    ]
    elements = [math.prod(each.call.results[0][1]) for each in gradients]
    total = sum(elements)
    if not total:
        return None

    def share(of: Callable[[OperatorRange], float]) -> float:
        return sum(of(each.operator) * count for each, count in zip(gradients, elements, strict=True)) / total

    return Flushed(
        share(lambda each: each.flushed),
        share(lambda each: each.flushed_scaled),
        max((each.operator.output for each in gradients if math.isfinite(each.operator.output)), default=0.0),
    )


def _dtypes(call: Call) -> set[torch.dtype]:
    return {operand.dtype for operand in call.operands} | {dtype for dtype, _ in call.results}


def _operation(op: str) -> str:
    """Return `aten.mm` for `aten.mm.default`; attention is one operation for all kernels."""
    return "attention" if is_attention(op) else op.rpartition(".")[0]


def _calls(trace: Trace) -> dict[_Key, list[Call]]:
    """Return the calls of forward and backward by module, operation and phase, as counted by the measurement."""
    calls: dict[_Key, list[Call]] = defaultdict(list)
    for call in trace.calls:
        if call.phase not in ("forward", "backward") or call.recomputed:
            continue
        if any(dtype in FLOATS for dtype, _ in call.results):
            calls[base_name(call.module), _operation(call.op), call.phase].append(call)
    return calls


def _casts(trace: Trace) -> dict[int, Call]:
    """Return casts of float32 results to float16 in the module that computed them, by the id of the computing
    call.
    """
    casts: dict[int, Call] = {}
    last: dict[str, Call] = {}
    for call in trace.calls:
        if call.phase != "forward" or not call.results:
            continue
        if call.op != _CAST:
            last[call.module] = call
        elif call.results[0][0] == torch.float16 and call.module in last:
            cast, operand = last[call.module], call.operands[0]
            if cast.results[0] == (operand.dtype, operand.shape):
                casts[id(cast)] = call
    return casts


def _measured(ranges: Ranges) -> dict[_Key, list[tuple[int, OperatorRange]]]:
    operators: dict[_Key, list[tuple[int, OperatorRange]]] = defaultdict(list)
    for at, operator in enumerate(ranges.operators):
        operators[operator.module, _operation(operator.op), operator.phase].append((at, operator))
    return operators


def _exceptions(trace: Trace) -> Mapping[str, tuple[str, int]]:
    """Return the policy's exceptions: a kept layer does not represent one with another exception."""
    policy = trace.setup.policy
    return {} if policy is None else {each.module: (each.how, each.exponent) for each in policy.exceptions}


def _folded_away(trace: Trace, measured: Iterable[_Key]) -> Mapping[str, Sequence[str]]:
    """Return the measured modules missing in a folded trace, by the name they share with their representatives."""
    seen = {base_name(call.module) for call in trace.calls}
    names: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(module for module, _, _ in measured):
        if name not in seen and starred(name) != name:
            names[starred(name)].append(name)
    return names


def _by_module(ranges: Ranges, module: str, call: Call) -> list[tuple[int, OperatorRange]]:
    """Return the module's magnitudes for a quantized layer's kernel, which is not measured itself."""
    known: ModuleRange | None = ranges.by_module.get(module)
    kernel = call.op.startswith("bitsandbytes.") and "dequantize" not in call.op
    if known is None or not kernel or call.phase != "forward":
        return []
    at = next((at for at, each in enumerate(ranges.operators) if each.module == module), 0)
    return [(at, OperatorRange(module, call.op, 0, "forward", (known.input,), known.output))]


def _matched(
    calls: Sequence[Call], operators: Sequence[tuple[int, OperatorRange]]
) -> Iterator[tuple[Call, tuple[int, OperatorRange]]]:
    """Yield calls with measured operators one by one; if their numbers differ, with the largest values of all."""
    if len(calls) == len(operators):
        yield from zip(calls, operators, strict=True)
    elif operators:
        at, first = operators[0]
        columns = zip_longest(*(each.inputs for _, each in operators), fillvalue=0.0)
        largest = replace(
            first,
            inputs=tuple(max(column) for column in columns),
            output=max(each.output for _, each in operators),
        )
        yield from ((call, (at, largest)) for call in calls)


def _value(call: Call, operator: OperatorRange, exponent: int, weight: float) -> tuple[float, bool] | None:
    """Return (largest magnitude that the call holds in float16, whether it is an operand); None without any.

    In a scaled layer, values are the measured ones times 2^-exponent, and gradients times 2^exponent. Its weights
    (largest magnitude: `weight`) are not scaled.
    """
    factor = 2.0 ** (-exponent if call.phase == "forward" else exponent)
    floats = [operand for operand in call.operands if operand.dtype in FLOATS]
    values = [
        (value * (1.0 if value == weight or _is_weight(operand, call) else factor), True)
        for operand, value in zip(floats, operator.inputs, strict=False)
        if operand.dtype == torch.float16 and not is_fill(value)
    ]
    if call.results[0][0] == torch.float16 and not is_fill(operator.output):
        values.append((operator.output * factor, False))
    return max(values, key=lambda pair: pair[0], default=None)


def _is_weight(operand: Operand, call: Call) -> bool:
    """Return whether an operand of a matmul is its layer's weight, cast or not."""
    origin = operand.origin if operand.origin.before is None else operand.origin.before
    own = base_name(origin.name.rpartition(".")[0]) == base_name(call.module)
    return call.flops > 0 and (origin.kind == "state" or (origin.kind == "parameter" and own))


@dataclass(frozen=True)
class Growth:
    """Growth of the residual stream: the first module with output beyond float16 ("" if none), and the largest."""

    first: str
    first_value: float
    last: str
    largest: float


def growth(ranges: Ranges) -> Growth | None:
    """Return the growth of the residual stream; None without a stream."""
    largest = ranges.residual
    if largest is None:
        return None
    beyond = next((each for each in ranges.stream_modules if each.output > FLOAT16_LARGEST), None)
    return Growth(
        "" if beyond is None else beyond.name,
        0.0 if beyond is None else beyond.output,
        largest.name,
        largest.output,
    )
