"""Decisions for float16 by measured ranges: dtype of the residual stream, exceptions, initial loss scale."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.formats import QUANTIZATIONS
from isotype.core.names import names_one_of
from isotype.core.tables import table
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.facts import ModelFacts
from isotype.precision.policy import DEFAULT_LOSS_SCALE, ModuleException, PrecisionPolicy
from isotype.precision.ranges import (
    FLOAT16_LARGEST,
    ModuleRange,
    OperatorRange,
    Ranges,
    first_loss_scale,
    is_fill,
)

MARGIN = 2.0
"""A magnitude counts as too large above 65504 (the largest float16 number) divided by this margin. See docs/ranges.md."""
LIMIT = FLOAT16_LARGEST / MARGIN

_UNSEEN = (
    "value ranges were not measured: a matmul overflows if its inputs or results exceed float16's 65504 "
    "(isotype.measure_ranges finds such matmuls; loss scaling protects gradients only)"
)

_SUBNORMAL = 2.0**-15
"""Weights with a smaller median magnitude lose digits, because float16 numbers below 2^-14 have fewer significant bits."""
_PRODUCTS = 64.0
"""Largest accepted product of a layer's largest gradient and largest input, in units of 65504. Both values rarely belong to the same token."""


@dataclass(frozen=True)
class RangeDecision:
    """The parts of a policy that measured ranges decide.

    Attributes:
        wide: True if the residual stream is float32.
        reasons: role -> reason, for `residual` and `loss_scaling`.
    """

    wide: bool = False
    exceptions: tuple[ModuleException, ...] = ()
    loss_scale: float = DEFAULT_LOSS_SCALE
    reasons: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def decide_by_ranges(
    facts: ModelFacts, profile: DeviceProfile, compute: torch.dtype, storage: str, ranges: Ranges | None
) -> RangeDecision:
    """Return the decisions that keep all values within the range of the dtype `compute`.

    float32 and bfloat16 need no exceptions. In float16, a module with large values is scaled or runs in float32, whichever is
    faster on the device. A module runs in float32 if float16 cannot hold its weights. `ranges` is None if no ranges were
    measured.
    """
    if compute != torch.float16:
        why = "as everything else" if compute == torch.float32 else "as the weights"
        return RangeDecision(reasons={"residual": why})
    if ranges is None:
        return _without_measurement(facts)
    scale, why_scale = _loss_scale(ranges)
    exceptions = {exception.module: exception for exception in _adapters(ranges, scale)}
    # If no value is large, the next exceptions are for weights that float16 cannot hold. Their results may be as small.
    dense = (*facts.dense, *facts.never_quantized, *facts.kept)
    others = {other.module: other for other in _exceptions(ranges, profile, storage, dense)}
    first = next(iter(others.values()), None)
    module, largest = _largest(ranges)
    reached = f"values reach {number(largest)} ({module or 'the model'}, measured {ranges.when[:10]})"
    if not largest <= LIMIT:  # also for NaN
        why = f"{reached}: more than half of 65504, the largest number of float16; hidden states take twice the bytes of float16"
    elif first is not None:
        why = f"{first.module} is in float32: {first.reason}; hidden states take twice the bytes of float16"
    elif largest:
        why = f"as the weights: {reached}, headroom {FLOAT16_LARGEST / largest:.2g}"
    else:
        why = "as the weights; all measured values are far below 65504, the largest number of float16"
    wide = bool(others) or not largest <= LIMIT
    reasons = {"residual": "; ".join((why, *ranges.notes)), "loss_scaling": why_scale}
    return RangeDecision(wide, tuple((exceptions | others).values()), scale, reasons)


def with_ranges_of(policy: PrecisionPolicy, saved: PrecisionPolicy | None) -> PrecisionPolicy:
    """Return a float16 `policy` with the range decisions of `saved`, so that a resumed run does not measure again."""
    if saved is None or not policy.compute == saved.compute == torch.float16:
        return policy
    roles = {role: saved.reasons[role] for role in ("residual", "loss_scaling") if role in saved.reasons}
    return replace(
        policy,
        wide_residual=saved.wide_residual,
        exceptions=saved.exceptions,
        loss_scale=saved.loss_scale,
        reasons={**policy.reasons, **roles},
        warnings=tuple(text for text in policy.warnings if text != _UNSEEN or text in saved.warnings),
    )


def number(value: float) -> str:
    """Return a magnitude for messages: `104,000`, `3.2`, `4e-09`."""
    if not math.isfinite(value):
        return "infinity" if value > 0 else "NaN"
    return f"{float(f'{value:.3g}'):,.0f}" if 1000 <= value < 1e9 else f"{value:.3g}"


# ------------------------------------------------------------------------------------------ without a measurement


@cache
def known_ranges(model_type: str | None) -> str:
    """Describe the published ranges of a model family, with the source; "" if none are known."""
    family = table(__file__, "families.json").get(model_type)
    return f"{family['reaches']} ({family['source']})" if family else ""


def _without_measurement(facts: ModelFacts) -> RangeDecision:
    trained, known = facts.trained_dtype, known_ranges(facts.model_type)
    if trained == torch.float16 and not known:
        why = "as the weights: the ranges are unknown, but the checkpoint was trained in float16"
        return RangeDecision(reasons={"residual": why})
    origin = "the checkpoint's training dtype is unknown"
    if trained is not None:
        origin = f"the checkpoint was trained in {dtype_name(trained)}, which has a larger range than float16"
    why = (
        f"{known}; not measured on this checkpoint"
        if known
        else f"the ranges are unknown, and {origin}; hidden states take twice the bytes of float16 until "
        "isotype.measure_ranges shows that float16 is enough"
    )
    return RangeDecision(wide=True, reasons={"residual": why}, warnings=(_UNSEEN,))


# ---------------------------------------------------------------------------------------------- with a measurement


def _largest(ranges: Ranges) -> tuple[str, float]:
    """Return (module, value) of the largest magnitude that a float16 forward would store."""
    values = [
        *((module.name, module.input) for module in ranges.modules if module.kind == "linear"),
        *((module.name, module.output) for module in ranges.modules),
        *((module.name, module.weight) for module in ranges.modules if module.kind != "norm"),
        *((operator.module, value) for operator, value in _forward_operators(ranges)),
    ]
    return max((pair for pair in values if not is_fill(pair[1])), key=lambda pair: pair[1], default=("", 0.0))


def _forward_operators(ranges: Ranges) -> Iterator[tuple[OperatorRange, float]]:
    """Yield (operator, largest magnitude except fill values of masks) for operators of the forward outside of norms."""
    kinds = {module.name: module.kind for module in ranges.modules}
    for operator in ranges.operators:
        if operator.phase == "forward" and kinds.get(operator.module) != "norm":
            values = (value for value in (operator.output, *operator.inputs) if not is_fill(value))
            yield operator, max((0.0, *values))


def _exceptions(
    ranges: Ranges, profile: DeviceProfile, storage: str, dense: Collection[str]
) -> Iterator[ModuleException]:
    """Yield a `ModuleException` for each module that cannot run in float16, even with a float32 residual stream."""
    # Blocks and all their parents only pass on the residual stream.
    paths = [name.split(".") for name in ranges.stream]
    stream = {"", *(".".join(path[: end + 1]) for path in paths for end in range(len(path)))}
    worst: dict[str, tuple[OperatorRange, float]] = {}
    for operator, value in _forward_operators(ranges):
        if value > worst.get(operator.module, (operator, LIMIT))[1]:
            worst[operator.module] = operator, value
    for module in ranges.modules:
        in_stream = module.kind == "other" and module.name in stream
        if not in_stream and (reason := _of_weights(module, storage, dense)):
            yield ModuleException(module.name, "float32", reason=reason)
        elif module.kind == "linear":
            exception = _linear(module, profile, storage)
            if exception is not None:
                yield exception
        elif module.kind == "embedding" and module.output > LIMIT:
            # Some models scale the looked-up rows, in the dtype of the embedding's weight.
            largest, what = max((module.weight, "weights"), (module.output, "results"))
            yield ModuleException(module.name, "float32", reason=f"its {what} reach {number(largest)}")
        elif module.kind == "norm" and storage == "float32" and module.output > LIMIT:
            # Float weights in float32 have no boundaries for the residual stream: a norm returns its input's dtype, float16.
            yield ModuleException(module.name, "float32", reason=f"its results reach {number(module.output)}")
        elif module.kind == "other" and module.name in worst and not in_stream:
            operator, value = worst[module.name]
            op = operator.op.split(".")[1] if "." in operator.op else operator.op
            reason = f"the operands of {op} reach {number(value)}"
            yield ModuleException(module.name, "float32", reason=reason)


def _of_weights(module: ModuleRange, storage: str, dense: Collection[str]) -> str:
    """Return the reason why float16 cannot hold the weights of a module; "" if it can."""
    quantized = not names_one_of(module.name, dense)
    # The rows of int8 have float32 scales. Autocast rounds the weights of float32 matmuls, and no others.
    if storage == "int8" and quantized if module.kind == "linear" else storage == "float32":
        return ""
    if module.weight > FLOAT16_LARGEST:
        return f"its weights reach {number(module.weight)}"
    small = 0 < module.median_weight < _SUBNORMAL
    return (
        f"its weights are near {number(module.median_weight)}, where float16 has few digits" if small else ""
    )


def _linear(module: ModuleRange, profile: DeviceProfile, storage: str) -> ModuleException | None:
    quantized = storage in QUANTIZATIONS
    largest, end = max((module.input, "inputs"), (module.output, "results"))
    if largest <= LIMIT or not math.isfinite(largest):
        return None
    reason = f"its {end} reach {number(largest)}"
    # Scaling costs two casts and two elementwise products. float32 costs a slower matmul.
    slower = profile.slower(torch.float16, torch.float32)
    fast = torch.float16 in profile.native if slower is None else slower < 1
    if not quantized and not fast:
        return ModuleException(module.name, "float32", reason=reason)
    return ModuleException(module.name, "scale", max(math.ceil(math.log2(largest / LIMIT)), 0), reason)


def _adapters(ranges: Ranges, scale: float) -> Iterator[ModuleException]:
    """Yield an exception for each linear layer whose adapters have scaled gradients (sums over tokens) that may exceed float16."""
    for module in ranges.modules:
        if module.kind == "linear" and scale * module.gradient * module.input > _PRODUCTS * FLOAT16_LARGEST:
            reason = f"inputs reach {number(module.input)}, gradients {number(module.gradient)}"
            yield ModuleException(module.name, "adapters", reason=reason)


def _loss_scale(ranges: Ranges) -> tuple[float, str]:
    """Return (loss scale, reason). With this scale, the largest measured gradient is at most 65504 / 16."""
    products = (op for op in ranges.operators if op.phase == "backward" and op.matmul)
    gradients = [*(module.gradient for module in ranges.modules), *(product.output for product in products)]
    largest = max((value for value in gradients if math.isfinite(value)), default=0.0)
    if not largest:
        return DEFAULT_LOSS_SCALE, "float16 gradients underflow below 6e-8 without loss scaling"
    return (
        first_loss_scale(largest),
        f"gradients reach {number(largest)} (measured); float16 gradients underflow below 6e-8 without loss scaling",
    )
