"""Code that the rules on weights share: sets of weights, their names, and their casts."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.formats import FOUR_BITS
from isotype.core.names import agree, distinct_names, in_module, plain_name, plural
from isotype.records.finding import Action, Fix
from isotype.records.trace import Quantization, Trace, Weight
from isotype.rules.kit.findings import actions, fix

_SMALLEST = {torch.bfloat16: -126, torch.float16: -14}  # exponent of the smallest normal value
_DIGITS = {torch.bfloat16: 7, torch.float16: 10}  # bits of the fraction


def trained(trace: Trace, *dtypes: torch.dtype) -> tuple[Weight, ...]:
    floats = (w for w in trace.weights if w.trainable and w.dtype.is_floating_point)
    return tuple(weight for weight in floats if not dtypes or weight.dtype in dtypes)


def count(weights: Iterable[Weight]) -> int:
    """Return the number of weight tensors. The weights of equal layers that were not traced also count."""
    return sum(weight.repeats for weight in weights)


def counted(weights: Iterable[Weight], noun: str, verb: str = "") -> str:
    """Return the number of weight tensors with a noun and a verb, as in `3 weights` or `1 weight holds`."""
    return agree(count(weights), noun, verb) if verb else plural(count(weights), noun)


def names(weights: Iterable[Weight]) -> tuple[str, ...]:
    return distinct_names(weight.name for weight in weights)


def modules(weights: Iterable[Weight]) -> tuple[str, ...]:
    """Return the distinct module names with `*` for layer numbers."""
    return distinct_names(weight.module for weight in weights)


def unseen_towers(trace: Trace) -> tuple[str, ...]:
    """Return the vision and audio towers that the step does not use, because its inputs have no image or audio."""
    towers = trace.setup.towers
    modules_used = {plain_name(call.module) for call in trace.calls} if towers else set()
    return tuple(t for t in towers if not any(in_module(module, t) for module in modules_used))


def casts(weights: Iterable[Weight], dtype: torch.dtype) -> tuple[Action, ...]:
    """Return an action for each name (with `*` for layer numbers) that casts the weights to `dtype`."""
    others = (weight for weight in weights if weight.dtype != dtype)
    return actions("parameter", names(others), dtype_name(dtype))


def cast_fix(description: str, weights: Sequence[Weight], dtype: torch.dtype) -> Fix:
    """Return a fix that casts `weights` to `dtype`. The fix is safe if `dtype` is known to represent all values of the weights."""
    return fix(description, "parameter", names(weights), dtype_name(dtype), is_exact(weights, dtype))


def is_exact(weights: Iterable[Weight], dtype: torch.dtype) -> bool:
    """Return True if `dtype` is known to represent all values of `weights`."""
    return all(weight.exact_in == dtype for weight in weights)


def borders(weights: Iterable[Weight], compute: torch.dtype) -> tuple[Action, ...]:
    """Return actions that make the modules of the weights compute in float32, with inputs and outputs in `compute`."""
    return actions("boundary", modules(weights), f"float32:{dtype_name(compute)}")


def repacked(trace: Trace) -> list[Weight]:
    """Return the 4-bit weights whose layout has no backward (IST407)."""
    return [weight for weight, state in quantized(trace) if state.repacked]


def quantized(trace: Trace) -> Iterator[tuple[Weight, Quantization]]:
    for weight in trace.weights:
        if weight.quantization is not None:
            yield weight, weight.quantization


def is_frozen_base(weight: Weight) -> bool:
    """Return True if a weight is a frozen parameter of the base model that is not quantized and not pinned to float32."""
    special = weight.trainable or weight.adapter or weight.pinned or weight.buffer
    return weight.quantization is None and not special


def extra_bytes(weights: Iterable[Weight], wanted: torch.dtype) -> int:
    """Return the number of bytes that a cast to `wanted` would save in all layers that `weights` represent."""
    return sum(w.repeats * math.prod(w.shape) * (w.dtype.itemsize - wanted.itemsize) for w in weights)


def main_dtype(
    weights: Iterable[Weight], size: Callable[[Weight], int] = lambda weight: weight.bytes * weight.repeats
) -> torch.dtype | None:
    """Return the dtype with the largest total `size` (bytes by default) of weights; None without weights."""
    sizes: Counter[torch.dtype] = Counter()
    for weight in weights:
        sizes[weight.dtype] += size(weight)
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def elements(weights: Sequence[Weight]) -> int:
    """Return the number of elements of the weights. A packed byte counts as two 4-bit elements."""
    total = 0
    for weight in weights:
        packed = weight.quantization is not None and weight.quantization.format in FOUR_BITS
        count = math.prod(weight.shape)
        total += weight.repeats * (2 * weight.dtype.itemsize * count if packed else count)
    return total


def float32_masters(trace: Trace, weights: Sequence[Weight]) -> tuple[Fix, ...]:
    """Return fixes that cast trainable `weights` to float32, and also the running statistics of norms among them.

    If the step has no autocast, one of two fixes also enables autocast.
    """
    float32 = casts(weights, torch.float32)
    if not float32:
        return ()
    statistics = [s for s in statistics_of(trace, weights) if s.dtype in HALVES]
    float32 += actions("buffer", names(statistics), "float32")
    adapters = all(weight.adapter for weight in weights)
    what = "adapters" if adapters else "trainable parameters"
    alone = Fix(
        f"keep the {what} in float32, so that the optimizer updates float32 values", "safe", actions=float32
    )
    # accelerate turns autocast on inside of the model's forward.
    products = [call.autocast for call in trace.calls if call.flops and call.phase == "forward"]
    if trace.setup.autocast is not None or (products and all(products)):
        return (alone,)
    low = (weight for weight in weights if weight.dtype in HALVES)
    compute = dtype_name(main_dtype(low, lambda _: 1) or torch.bfloat16)
    text = f"keep the {what} in float32 and run the step under autocast to {compute}"
    mixed = Fix(text, "safe", actions=(*float32, Action("setting", "autocast", compute)))
    # Without autocast, a model whose weights are all trained would compute in float32.
    return (alone, mixed) if adapters else (mixed, alone)


def statistics_of(trace: Trace, weights: Iterable[Weight]) -> list[Weight]:
    """Return the float buffers of the norms that contain `weights`, because a batch norm needs them in the dtype of its weight."""
    norms = {weight.module for weight in weights if weight.kind == "norm"}
    return [w for w in trace.weights if w.buffer and w.module in norms and w.dtype.is_floating_point]


def spacing(value: float, dtype: torch.dtype) -> float:
    """Return the distance from `value` to the next larger number in bfloat16 or float16."""
    exponent = max(math.floor(math.log2(value)), _SMALLEST[dtype]) if value > 0 else _SMALLEST[dtype]
    return math.ldexp(1.0, exponent - _DIGITS[dtype])


def layer_of(name: str) -> str:
    """Return a name up to its first layer number, such as `model.layers.0`; "" if the name has no layer number."""
    parts = name.split(".")
    numbered = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return "" if numbered is None else ".".join(parts[: numbered + 1])
