"""Mixed storage: chooses each linear layer's format by its damage to the model's output, within a memory limit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError
from isotype.core.formats import FITTED, FOUR_BITS, QUANTIZATIONS
from isotype.core.names import format_bytes, plural
from isotype.precision.damages import Damages
from isotype.precision.decide import PrecisionRequest
from isotype.precision.policy import LayerStorage, PrecisionPolicy

_SUMS = 1 << 15
"""Default of `sums`. A size that is rounded up becomes larger by at most 1/32768 of `room`."""


@dataclass(frozen=True, slots=True)
class Option:
    """A layer's size in one format, and the damage of this format to the model's output."""

    bytes: int
    damage: float


def choose(layers: Sequence[Sequence[Option]], room: int, *, sums: int = _SUMS) -> list[int] | None:
    """Choose an option for each layer: the least total damage within `room` bytes.

    At most `sums` (at least 1) different totals of bytes are compared. If more are possible, sizes are rounded up.

    Returns:
        The index of each layer's option; None if the smallest options do not fit.
    """
    least = [min(option.bytes for option in options) for options in layers]
    spare = room - sum(least)
    if spare < 0:
        return None
    extra = [[option.bytes - low for option in options] for options, low in zip(layers, least, strict=True)]
    step = math.gcd(*(size for options in extra for size in options)) or 1
    most = min(spare, sum(max(options) for options in extra))
    if most // step >= sums:
        step = math.ceil(most / (sums - 1)) if sums > 1 else most + 1
    steps = [[math.ceil(size / step) for size in options] for options in extra]
    return _table(layers, steps, min(spare // step, sum(map(max, steps))))


def _table(layers: Sequence[Sequence[Option]], steps: Sequence[Sequence[int]], room: int) -> list[int]:
    """Return the index of each layer's best option, by dynamic programming. `room` and `steps` have the same unit."""
    best = torch.zeros(room + 1, dtype=torch.float64)
    choices = []
    for options, sizes in zip(layers, steps, strict=True):
        values = torch.full((len(options), room + 1), torch.inf, dtype=torch.float64)
        for at, (option, size) in enumerate(zip(options, sizes, strict=True)):
            if size <= room:
                values[at, size:] = best[: room + 1 - size] + option.damage
        best, chosen = values.min(dim=0)
        choices.append(chosen.to(torch.int16))
    picked = []
    for chosen, sizes in zip(reversed(choices), reversed(steps), strict=True):
        at = int(chosen[room])
        picked.append(at)
        room -= sizes[at]
    return picked[::-1]


_TENTH = 10
"""By default, the layers may take a tenth more bytes than in nf4."""


def first_request(request: PrecisionRequest) -> PrecisionRequest:
    """Return the request with all layers in nf4. Its policy decides everything but the layers' formats.

    If the request leaves `double_quant` open, this function turns it on, because it costs little accuracy.
    """
    nested = True if request.double_quant is None else request.double_quant
    return replace(request, quantization="nf4", double_quant=nested, base_memory=None)


def as_decided(request: PrecisionRequest, policy: PrecisionPolicy) -> PrecisionRequest:
    return replace(
        request,
        quantization=policy.quantization,
        double_quant=policy.double_quant or None,
        quant_storage=policy.quant_storage if policy.storage in FOUR_BITS else None,
        layers=policy.layers,
        base_memory=None,
        quantized_parts="all" if policy.layers else request.quantized_parts,
    )


def with_constants_of(policy: PrecisionPolicy, saved: PrecisionPolicy | None) -> PrecisionPolicy:
    """Return `policy` with the moments of layer inputs from the policy `saved`, if both have the same layer formats.

    The moments determine the 4-bit constants, which a resumed run must not change.
    """
    if saved is None or policy.layer_formats != saved.layer_formats:
        return policy
    return replace(policy, layers=saved.layers)


def mix(
    damages: Damages, policy: PrecisionPolicy, parameters: int, request: PrecisionRequest
) -> tuple[PrecisionRequest, str]:
    """Choose the formats of all layers: the least damage within a memory limit.

    A layer gets nf4 with fitted constants (in blocks of 64 or 32), int8, or the dtype of the model's float weights.

    Args:
        policy: the policy with all layers in nf4.
        request: `base_memory` limits the bytes of all base weights. If it is None, the linear layers may take 10 % more
            than in nf4.

    Returns:
        (request, reason). In the request, `quantization` is nf4 if any layer has 4 bits, and `layers` names the layers
        in other formats. The reason counts the layers in each format, their bytes, and the estimated damage in nats per
        token.

    Raises:
        PrecisionError: the smallest formats exceed `base_memory`.
    """
    memory = request.base_memory
    plain = dtype_name(policy.plain)
    weights = sum(layer.rows * layer.columns for layer in damages.layers)
    others = (parameters - weights) * policy.plain.itemsize
    tenth = damages.bytes("nf4") + damages.bytes("nf4") // _TENTH
    room = tenth if memory is None else memory - others
    forms = (*FITTED, "int8", plain)
    options = [
        [Option(layer.bytes(form, double_quant=policy.double_quant), layer.damage_in(form)) for form in forms]
        for layer in damages.layers
    ]
    picked = choose(options, room)
    if picked is None:
        least = others + sum(min(option.bytes for option in layer) for layer in options)
        what = f"{format_bytes(memory or room)} for the weights of {damages.source}"
        expected = f"at least {format_bytes(least)}: every layer in nf4"
        fix = "allow more memory for the base weights, or use a smaller model or more GPUs (--fsdp 2)"
        raise PrecisionError.of("no mixed storage fits", what, expected, fix)
    chosen = {layer.module: forms[at] for layer, at in zip(damages.layers, picked, strict=True)}
    size = sum(layer[at].bytes for layer, at in zip(options, picked, strict=True))
    kinds = set(chosen.values())
    storage = "nf4" if kinds & set(FITTED) else "int8" if "int8" in kinds else plain
    damage = damages.estimate(chosen, "nf4")
    counts = Counter(chosen.values())
    count = ", ".join(f"{counts[form]} in {form}" for form in forms if counts[form])
    reason = (
        f"mixed: {plural(len(chosen), 'linear layer')} ({count}) of {format_bytes(size)} in total "
        f"(limit: {format_bytes(room)}, {'a tenth more than in nf4' if memory is None else 'the memory that the other weights leave'}). "
        f"The damage, measured on {plural(damages.tokens, 'token')}, is about {damage:.2g} nats a token; "
        f"with all layers in nf4, it would be {damages.total('nf4'):.2g}"
    )
    differing = tuple(
        LayerStorage(layer.module, form, layer.moments if form in FITTED else "")
        for layer in damages.layers
        if (form := chosen[layer.module]) != storage
    )
    mixed = replace(
        request,
        quantization=storage if storage in QUANTIZATIONS else None,
        double_quant=(policy.double_quant and storage == "nf4") or None,
        quant_storage=request.quant_storage if storage == "nf4" else None,
        layers=differing,
        base_memory=None,
        quantized_parts="all",  # the damage alone decides each layer's format
    )
    return mixed, reason


def base_bytes(damages: Damages, policy: PrecisionPolicy, parameters: int) -> int:
    """Return the bytes of all base weights under a policy. `base_memory` limits them."""
    weights = sum(layer.rows * layer.columns for layer in damages.layers)
    double = policy.double_quant
    layers = sum(x.bytes(policy.storage_of(x.module), double_quant=double) for x in damages.layers)
    return layers + (parameters - weights) * policy.plain.itemsize
