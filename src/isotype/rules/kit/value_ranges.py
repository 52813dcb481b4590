"""The values of a step's float16 tensors, from a trace and a measurement in float32.

A value has about the same magnitude in every dtype, unless it overflows. One measurement of a model is therefore enough
for all its traces, including traces with fixes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from isotype.core.dtypes import FLOATS
from isotype.core.names import base_name, grouped, short, starred
from isotype.precision.ranges import FLOAT16_LARGEST, OperatorRange, Ranges, is_attention, is_fill
from isotype.records.trace import Call, Operand, Trace
from isotype.rules.kit.groups import per_trace

_CAST = "aten._to_copy.default"

_Key = tuple[str, str, str]


@dataclass(frozen=True)
class Float16Value:
    """The largest measured float16 value of a traced call.

    Attributes:
        call: the traced call. The call may represent the same operator in several layers.
        operator: the measured ranges of the operator, in one of the layers that `call` represents.
        at: position of the measured operator in the program. For a cast of its result, the position is 0.5 larger.
        value: the largest magnitude of the call's float16 operands or results.
        takes: True if an operand of the call has this magnitude, False if a result of the call has it.
    """

    call: Call
    operator: OperatorRange
    at: float
    value: float
    takes: bool

    @property
    def module(self) -> str:
        """Name of the measured module. If `call` runs in this module, the name contains the parts that wrappers such as PEFT add."""
        same = base_name(self.call.module) == self.operator.module
        return self.call.module if same else self.operator.module

    @property
    def headroom(self) -> float:
        """float16's largest number divided by the value."""
        return FLOAT16_LARGEST / self.value if self.value else math.inf


def computes_float16(trace: Trace) -> bool:
    return any(torch.float16 in call.dtypes for call in trace.calls)


def largest(trace: Trace) -> Float16Value | None:
    """Return the largest measured value that the forward computes in float16; None if there is none."""
    forward = (value for value in float16_values(trace) if value.call.phase == "forward")
    return max(forward, key=lambda value: value.value, default=None)


@per_trace
def float16_values(trace: Trace) -> tuple[Float16Value, ...]:
    """Return each measured value that the step computes in float16, in program order; () without a measurement."""
    ranges, policy = trace.setup.ranges, trace.setup.policy
    if ranges is None:
        return ()
    values = []
    measured = grouped(enumerate(ranges.operators), lambda item: _key(item[1]))
    away = _folded_away(trace, measured)
    # A traced layer does not represent a layer with another exception in the policy.
    exceptions = {} if policy is None else {e.module: (e.how, e.exponent) for e in policy.exceptions}
    casts = _casts(trace)
    weights = {layer.name: layer.weight for layer in ranges.modules}
    measurable = (c for c in trace.calls if c.phase in ("forward", "backward") and not c.recomputed)
    floats = (c for c in measurable if any(dtype in FLOATS for dtype, _ in c.results))
    for (module, op, phase), calls in grouped(floats, _key).items():
        others = away.get(starred(module), ()) if calls[0].repeats > 1 else ()
        alike = (name for name in others if exceptions.get(name) == exceptions.get(module))
        for layer in (module, *alike):
            operators = measured.get((layer, op, phase)) or _by_module(ranges, layer, calls[0])
            for call, (at, operator) in _matched(calls, operators):
                value = _value(call, operator, trace.by_ranges.get(module, 0), weights.get(layer, 0.0))
                if value is not None:
                    values.append(Float16Value(call, operator, at, *value))
                elif id(call) in casts and not is_fill(operator.output):
                    values.append(Float16Value(casts[id(call)], operator, at + 0.5, operator.output, False))
    return tuple(sorted(values, key=lambda value: value.at))


@dataclass(frozen=True)
class Flushed:
    """Shares (0 to 1) of the elements of a step's float16 gradients that become zero.

    Attributes:
        plain: the share without loss scaling.
        scaled: the share at a loss scale of 65536.
        gradient: the largest finite gradient; 0 if there is none.
    """

    plain: float
    scaled: float
    gradient: float


@per_trace
def flushed(trace: Trace) -> Flushed | None:
    """Return the shares of gradients that become zero in float16 in the backward; None without a measurement."""
    backward = [value for value in float16_values(trace) if value.call.phase == "backward"]
    results = [(value.operator, *value.call.results[0]) for value in backward]
    gradients = [(operator, math.prod(shape)) for operator, dtype, shape in results if dtype == torch.float16]
    total = sum(count for _, count in gradients)
    if not total:
        return None
    return Flushed(
        sum(operator.flushed * count for operator, count in gradients) / total,
        sum(operator.flushed_scaled * count for operator, count in gradients) / total,
        max((operator.output for operator, _ in gradients if math.isfinite(operator.output)), default=0.0),
    )


def _key(call: Call | OperatorRange) -> _Key:
    """Return the key (module, operator, phase) of a traced or measured call. In it, all attention kernels have the same name."""
    operator = "attention" if is_attention(call.op) else call.op.rpartition(".")[0]
    return base_name(call.module), operator, call.phase


def _casts(trace: Trace) -> dict[int, Call]:
    """Return a dictionary from the id of a call to a cast, for each call whose result is cast to float16 in the module of the call."""
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


def _folded_away(trace: Trace, measured: Iterable[_Key]) -> Mapping[str, Sequence[str]]:
    """Return the names of measured modules that were not traced, grouped by the name with `*` for layer numbers."""
    traced = {base_name(call.module) for call in trace.calls}
    names = dict.fromkeys(module for module, _, _ in measured)
    return grouped((name for name in names if name not in traced and starred(name) != name), starred)


def _by_module(ranges: Ranges, module: str, call: Call) -> list[tuple[int, OperatorRange]]:
    """Return the measured range of a quantized layer as the range of the layer's kernel, because kernels are not measured."""
    layer = ranges.by_module.get(module)
    kernel = call.op.startswith("bitsandbytes.") and "dequantize" not in call.op
    if layer is None or not kernel or call.phase != "forward":
        return []
    at = next((at for at, operator in enumerate(ranges.operators) if operator.module == module), 0)
    return [(at, OperatorRange(module, call.op, 0, "forward", (layer.input,), layer.output))]


def _matched(
    calls: Sequence[Call], operators: Sequence[tuple[int, OperatorRange]]
) -> Iterator[tuple[Call, tuple[int, OperatorRange]]]:
    """Yield every call with its measured operator.

    The number of calls may differ from the number of operators, for example because a frozen input needs no gradient.
    In this case, the calls of a source line are matched with the operators of the same line. If these numbers also
    differ, each call gets the largest values of all operators in its line. A call whose line has no operator gets the
    largest values of all operators.
    """
    if len(calls) == len(operators):
        yield from zip(calls, operators, strict=True)
        return
    by_line = grouped(operators, lambda measured: short(measured[1].source))
    for line, same in grouped(calls, lambda call: short(call.source)).items():
        candidates = by_line.get(line, operators)
        if len(same) == len(candidates):
            yield from zip(same, candidates, strict=True)
        elif candidates:
            largest = _largest_of(candidates)
            yield from ((call, largest) for call in same)


def _largest_of(operators: Sequence[tuple[int, OperatorRange]]) -> tuple[int, OperatorRange]:
    """Return the first operator with its magnitudes replaced by the largest magnitudes of all operators."""
    at, first = operators[0]
    columns = zip_longest(*(operator.inputs for _, operator in operators), fillvalue=0.0)
    output = max(operator.output for _, operator in operators)
    return at, replace(first, inputs=tuple(map(max, columns)), output=output)


def _value(call: Call, operator: OperatorRange, exponent: int, weight: float) -> tuple[float, bool] | None:
    """Return the largest float16 magnitude of a call, and True if an operand has this magnitude; None without a
    float16 tensor.

    In a scaled layer, values are divided by 2^exponent, and gradients are multiplied by 2^exponent. The weights of the
    layer are not scaled. Their largest magnitude is `weight`.
    """
    factor = 2.0 ** (-exponent if call.phase == "forward" else exponent)
    values = [
        (value * (1.0 if value == weight or _is_weight(operand, call) else factor), True)
        for operand, value in zip(call.floats, operator.inputs, strict=False)
        if operand.dtype == torch.float16 and not is_fill(value)
    ]
    if call.results[0][0] == torch.float16 and not is_fill(operator.output):
        values.append((operator.output * factor, False))
    return max(values, key=lambda pair: pair[0], default=None)


def _is_weight(operand: Operand, call: Call) -> bool:
    """Return True if an operand of a matmul is the weight of its layer, or a cast of this weight."""
    origin = operand.origin if operand.origin.before is None else operand.origin.before
    of_layer = base_name(origin.name.rpartition(".")[0]) == base_name(call.module)
    return call.flops > 0 and (origin.kind == "state" or (origin.kind == "parameter" and of_layer))
