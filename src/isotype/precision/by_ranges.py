"""Decisions for float16 from measured ranges: the residual stream's dtype, exceptions, the initial loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from json import loads
from typing import TYPE_CHECKING

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.formats import QUANTIZATIONS
from isotype.precision.policy import DEFAULT_LOSS_SCALE, ModuleException, PrecisionPolicy
from isotype.precision.ranges import (
    FLOAT16_LARGEST,
    ModuleRange,
    OperatorRange,
    Ranges,
    first_loss_scale,
    is_fill,
)

if TYPE_CHECKING:
    from isotype.precision.devices.profile import DeviceProfile
    from isotype.precision.facts import ModelFacts

MARGIN = 2.0
"""float16's largest number divided by the largest accepted magnitude; derived in docs/ranges.md."""
LIMIT = FLOAT16_LARGEST / MARGIN

_UNSEEN = (
    "value ranges were not measured: a matmul whose inputs or results exceed float16's 65504 "
    "still overflows (isotype.measure_ranges finds it; loss scaling protects gradients only)"
)

_SUBNORMAL = 2.0**-15
"""Weights with a smaller median lose digits: float16 has fewer bits than bfloat16's below 2^-14."""
_PRODUCTS = 64.0
"""Largest gradient times largest input overstates a weight's gradient, since they are rarely at the same token."""


@dataclass(frozen=True)
class RangeDecision:
    """Parts of a policy that follow from measured ranges.

    Attributes:
        wide: whether the residual stream is carried in float32.
        exceptions: modules that cannot run in float16 as the others do.
        loss_scale: the initial loss scale.
        reasons: role -> reason, for `residual` and `loss_scaling`.
        warnings: risks that could not be excluded.
    """

    wide: bool = False
    exceptions: tuple[ModuleException, ...] = ()
    loss_scale: float = DEFAULT_LOSS_SCALE
    reasons: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def decide_by_ranges(
    facts: ModelFacts, profile: DeviceProfile, compute: torch.dtype, storage: str, ranges: Ranges | None
) -> RangeDecision:
    """Return the decisions that keep all values in `compute`'s range; none for float32 and bfloat16.

    An exception is scaled or runs in float32, whichever is faster on the device of `profile`. `ranges` None:
    not measured.
    """
    if compute != torch.float16:
        why = "as everything else" if compute == torch.float32 else "as the weights"
        return RangeDecision(reasons={"residual": why})
    if ranges is None:
        return _without_measurement(facts)
    scale, why_scale = _loss_scale(ranges)
    worst = _largest(ranges)
    adapters = {each.module: each for each in _adapters(ranges, scale)}
    if worst is None or worst[1] <= LIMIT:
        return RangeDecision(
            exceptions=tuple(adapters.values()),
            loss_scale=scale,
            reasons={"residual": _narrow(ranges, worst) + _unmeasured(ranges), "loss_scaling": why_scale},
        )
    others = {each.module: each for each in _exceptions(ranges, profile, storage)}
    return RangeDecision(
        wide=True,
        exceptions=tuple({**adapters, **others}.values()),
        loss_scale=scale,
        reasons={
            "residual": (
                f"{_reached(ranges, worst)}: more than half of float16's 65504; hidden states take twice the bytes of float16"
                + _unmeasured(ranges)
            ),
            "loss_scaling": why_scale,
        },
    )


def with_ranges_of(policy: PrecisionPolicy, saved: PrecisionPolicy | None) -> PrecisionPolicy:
    """Return a float16 `policy` with the decisions from ranges in `saved`, for resuming without a measurement."""
    if saved is None or not policy.compute == saved.compute == torch.float16:
        return policy
    roles = {role: saved.reasons[role] for role in ("residual", "loss_scaling") if role in saved.reasons}
    return replace(
        policy,
        wide_residual=saved.wide_residual,
        exceptions=saved.exceptions,
        loss_scale=saved.loss_scale,
        reasons={**policy.reasons, **roles},
        warnings=tuple(
            warning for warning in policy.warnings if warning != _UNSEEN or warning in saved.warnings
        ),
    )


def _narrow(ranges: Ranges, worst: tuple[str, float] | None) -> str:
    if worst is None or not worst[1]:
        return "as the weights; nothing that was measured comes near float16's 65504"
    return f"as the weights: {_reached(ranges, worst)}, headroom {FLOAT16_LARGEST / worst[1]:.2g}"


def _unmeasured(ranges: Ranges) -> str:
    return "".join(f"; {note}" for note in ranges.notes)


def _reached(ranges: Ranges, worst: tuple[str, float]) -> str:
    name, value = worst
    return f"values reach {number(value)} ({name or 'the model'}, measured {ranges.when[:10]})"


def number(value: float) -> str:
    """Return a magnitude for messages: `104,000`, `3.2`, `4e-09`."""
    if not math.isfinite(value):
        return "infinity" if value > 0 else "NaN"
    return f"{float(f'{value:.3g}'):,.0f}" if 1000 <= value < 1e9 else f"{value:.3g}"


# ------------------------------------------------------------------------------------------ without a measurement


@cache
def known_families() -> Mapping[str, Mapping[str, str]]:
    """Return model_type -> published ranges (`reaches`) and their `source`."""
    table: Mapping[str, Mapping[str, str]] = loads(
        (files("isotype") / "precision" / "families.json").read_text(encoding="utf-8")
    )
    return table


def _without_measurement(facts: ModelFacts) -> RangeDecision:
    known = known_families().get(facts.model_type or "")
    trained = facts.trained_dtype
    if known:
        why = f"{known['reaches']} ({known['source']}); not measured on this checkpoint"
        return RangeDecision(wide=True, reasons={"residual": why}, warnings=(_UNSEEN,))
    if trained == torch.float16:
        why = "as the weights: ranges unknown, but the checkpoint was trained in float16"
        return RangeDecision(reasons={"residual": why})
    origin = (
        f"the checkpoint was trained in {dtype_name(trained)}, which has a larger range than float16"
        if trained is not None
        else "the checkpoint's training dtype is unknown"
    )
    why = (
        f"ranges unknown, and {origin}; hidden states take twice the bytes of float16 until isotype.measure_ranges shows "
        "that they need not"
    )
    return RangeDecision(wide=True, reasons={"residual": why}, warnings=(_UNSEEN,))


# ---------------------------------------------------------------------------------------------- with a measurement


def _largest(ranges: Ranges) -> tuple[str, float] | None:
    """Return (module, value) of the largest magnitude that an all-float16 forward would round."""
    found = [
        *((module.name, module.input) for module in ranges.modules if module.kind == "linear"),
        *((module.name, module.output) for module in ranges.modules),
        *((module.name, module.weight) for module in ranges.modules if module.kind != "norm"),
        *((operator.module, value) for operator, value in _own_operators(ranges)),
    ]
    return max(
        ((name, value) for name, value in found if not is_fill(value)),
        key=lambda pair: pair[1],
        default=None,
    )


def _own_operators(ranges: Ranges) -> Iterator[tuple[OperatorRange, float]]:
    """Yield the operators that a forward runs in 16 bits, with their largest magnitudes.

    Norms are excluded: they compute in float32.
    """
    kinds = {module.name: module.kind for module in ranges.modules}
    for operator in ranges.operators:
        if operator.phase == "forward" and kinds.get(operator.module) != "norm":
            # A fill value among the operands carries no information, the others do.
            values = (value for value in (operator.output, *operator.inputs) if not is_fill(value))
            yield operator, max((0.0, *values))


def _exceptions(ranges: Ranges, profile: DeviceProfile, storage: str) -> Iterator[ModuleException]:
    """Yield the modules that cannot run in float16 even with a float32 residual stream."""
    stream = _carriers(ranges)
    own: dict[str, tuple[OperatorRange, float]] = {}
    for operator, value in _own_operators(ranges):
        if value > own.get(operator.module, (operator, LIMIT))[1]:
            own[operator.module] = operator, value
    for module in ranges.modules:
        if module.kind == "linear":
            exception = _linear(module, profile, storage)
            if exception is not None:
                yield exception
        elif module.kind == "embedding" and (module.weight > FLOAT16_LARGEST or module.output > LIMIT):
            # Some scale the looked-up rows, in the dtype of their weight.
            largest, what = max((module.weight, "weights"), (module.output, "results"))
            yield ModuleException(module.name, "float32", reason=f"its {what} reach {number(largest)}")
        elif module.kind == "other" and module.name in own and module.name not in stream:
            operator, value = own[module.name]
            op = operator.op.split(".")[1] if "." in operator.op else operator.op
            yield ModuleException(
                module.name, "float32", reason=f"the operands of {op} reach {number(value)}"
            )


def _carriers(ranges: Ranges) -> frozenset[str]:
    """Return the modules that only pass on the residual stream: its blocks and all their parents."""
    carriers = {"", *ranges.stream}
    for name in ranges.stream:
        parts = name.split(".")
        carriers |= {".".join(parts[:count]) for count in range(1, len(parts))}
    return frozenset(carriers)


def _linear(module: ModuleRange, profile: DeviceProfile, storage: str) -> ModuleException | None:
    quantized = storage in QUANTIZATIONS
    int8 = storage == "int8"  # any range: its rows have float32 scales
    if module.weight > FLOAT16_LARGEST and not int8:
        return ModuleException(module.name, "float32", reason=f"its weights reach {number(module.weight)}")
    if 0 < module.median_weight < _SUBNORMAL and not int8:
        return ModuleException(
            module.name,
            "float32",
            reason=f"its weights are near {number(module.median_weight)}, where float16 has few digits",
        )
    largest, end = max((module.input, "inputs"), (module.output, "results"))
    if largest <= LIMIT or not math.isfinite(largest):
        return None
    reason = f"its {end} reach {number(largest)}"
    # Two casts and two products of activations, against a matmul at float32's rate.
    if not quantized and not _float16_is_faster(profile):
        return ModuleException(module.name, "float32", reason=reason)
    return ModuleException(
        module.name, "scale", exponent=max(math.ceil(math.log2(largest / LIMIT)), 0), reason=reason
    )


def _float16_is_faster(profile: DeviceProfile) -> bool:
    measured = profile.slower(torch.float16, torch.float32)
    return torch.float16 in profile.native if measured is None else measured < 1


def _adapters(ranges: Ranges, scale: float) -> Iterator[ModuleException]:
    """Yield linear layers whose adapters' gradients can exceed float16's range at the loss scale.

    The gradient of lora_B is the sum over tokens of the output's gradient times lora_A's output, that of
    lora_A likewise times the layer's input (https://arxiv.org/abs/2106.09685, equation 3).
    """
    for module in ranges.modules:
        if module.kind == "linear" and scale * module.gradient * module.input > _PRODUCTS * FLOAT16_LARGEST:
            yield ModuleException(
                module.name,
                "adapters",
                reason=f"inputs reach {number(module.input)}, gradients {number(module.gradient)}",
            )


def _loss_scale(ranges: Ranges) -> tuple[float, str]:
    """Return the loss scale at which the largest measured gradient is a sixteenth of 65504, and the reason."""
    gradients = [
        *(module.gradient for module in ranges.modules),
        *(
            operator.output
            for operator in ranges.operators
            if operator.phase == "backward" and operator.matmul
        ),
    ]
    largest = max((value for value in gradients if math.isfinite(value)), default=0.0)
    if not largest:
        return DEFAULT_LOSS_SCALE, "float16 gradients underflow below 6e-8 without it"
    return (
        first_loss_scale(largest),
        f"gradients reach {number(largest)} (measured): float16 gradients underflow below 6e-8 without it",
    )
