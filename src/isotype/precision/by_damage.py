"""Mixed storage: the format of each linear layer by its damage to the model's output, within a memory limit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
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
"""Distinct sums of bytes: rounding loses at most 1/32768 of the room per layer."""


@dataclass(frozen=True, slots=True)
class Option:
    """A way to store a layer: its bytes, and its damage to the model's output."""

    bytes: int
    damage: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen options.

    Attributes:
        options: index of each layer's option.
        bytes: sum of their bytes.
        damage: sum of their damages.
    """

    options: tuple[int, ...]
    bytes: int
    damage: float


def choose(layers: Sequence[Sequence[Option]], room: int, *, sums: int = _SUMS) -> Choice | None:
    """Return one option per layer with the least damage within `room` bytes; None if even the smallest do not
    fit.

    `sums` is the number of distinct sums of bytes, at least 1. With more, sizes are rounded up to fewer.
    """
    least = [min(option.bytes for option in options) for options in layers]
    spare = room - sum(least)
    if spare < 0:
        return None
    extra = [[option.bytes - low for option in options] for options, low in zip(layers, least, strict=True)]
    step = math.gcd(*(each for options in extra for each in options)) or 1
    most = min(spare, sum(max(options) for options in extra))
    if most // step >= sums:
        step = math.ceil(most / (sums - 1)) if sums > 1 else most + 1
    steps = [[math.ceil(each / step) for each in options] for options in extra]
    picked = _table(layers, steps, min(spare // step, sum(map(max, steps))))
    chosen = [options[at] for options, at in zip(layers, picked, strict=True)]
    return Choice(
        tuple(picked),
        sum(option.bytes for option in chosen),
        math.fsum(option.damage for option in chosen),
    )


def _table(layers: Sequence[Sequence[Option]], steps: Sequence[Sequence[int]], room: int) -> list[int]:
    """Return the indices of the best options within `room` steps, by dynamic programming."""
    best = torch.zeros(room + 1, dtype=torch.float64)
    taken = []
    for options, sizes in zip(layers, steps, strict=True):
        values = torch.full((len(options), room + 1), torch.inf, dtype=torch.float64)
        for at, (option, size) in enumerate(zip(options, sizes, strict=True)):
            if size <= room:
                values[at, size:] = best[: room + 1 - size] + option.damage
        best, chosen = values.min(dim=0)
        taken.append(chosen.to(torch.int16))
    picked, left = [], room
    for chosen, sizes in zip(reversed(taken), reversed(steps), strict=True):
        at = int(chosen[left])
        picked.append(at)
        left -= sizes[at]
    return picked[::-1]


_TENTH = 10
"""Divisor of nf4's bytes for the default room: a tenth more."""


@dataclass(frozen=True)
class Mixture:
    """A decision on mixed storage.

    Attributes:
        storage: format of most layers: a 4-bit one if there is any.
        layers: layers in another format.
        double_quant: whether the constants of 4-bit layers are quantized.
        bytes: of all layers.
        damage: estimated, in nats per token.
        reason: in words.
    """

    storage: str
    layers: tuple[LayerStorage, ...]
    double_quant: bool
    bytes: int
    damage: float
    reason: str

    def applied(self, request: PrecisionRequest) -> PrecisionRequest:
        """Return the request for this base."""
        return replace(
            request,
            quantization=self.storage if self.storage in QUANTIZATIONS else None,
            double_quant=self.double_quant or None,
            quant_storage=request.quant_storage if self.storage == "nf4" else None,
            layers=self.layers,
            base_memory=None,
            quantized_parts="all",  # every layer by its damage
        )


def first_request(request: PrecisionRequest) -> PrecisionRequest:
    """Return the request for everything but the layers' formats; its constants are quantized, which costs little."""
    nested = True if request.double_quant is None else request.double_quant
    return replace(request, quantization="nf4", double_quant=nested, base_memory=None)


def as_decided(request: PrecisionRequest, policy: PrecisionPolicy) -> PrecisionRequest:
    """Return the request for a policy's base, mixed or not."""
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
    """Return `policy` with the moments of `saved` if all layers have the same formats.

    A resumed run keeps its initial 4-bit constants, whatever was measured since.
    """
    if saved is None or policy.layer_formats != saved.layer_formats:
        return policy
    return replace(policy, layers=saved.layers)


def mix(damages: Damages, policy: PrecisionPolicy, parameters: int, memory: int | None = None) -> Mixture:
    """Return the formats with the least damage: nf4 in blocks of 64 or 32 with fitted constants, int8, or
    unquantized.

    Args:
        damages: measured of the model.
        policy: with all layers in nf4.
        parameters: number of the model's parameters, including layers.
        memory: limit of the base's weights in bytes; None: nf4's bytes plus a tenth for the layers.

    Raises:
        PrecisionError: the smallest formats exceed `memory`.
    """
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
    choice = choose(options, room)
    if choice is None:
        least = others + sum(min(option.bytes for option in layer) for layer in options)
        raise PrecisionError.of(
            "no mixed storage fits",
            f"{format_bytes(memory or room)} for the weights of {damages.source}",
            f"at least {format_bytes(least)}: every layer in nf4",
            "give more memory for the base, a smaller model, or more GPUs (--fsdp 2)",
        )
    chosen = {layer.module: forms[at] for layer, at in zip(damages.layers, choice.options, strict=True)}
    storage = _most(chosen, plain)
    damage = damages.estimate(chosen, "nf4")
    counts = Counter(chosen.values())
    count = ", ".join(f"{counts[form]} in {form}" for form in forms if counts[form])
    reason = (
        f"mixed: of {plural(len(chosen), 'linear layer')} {count}, {format_bytes(choice.bytes)} "
        f"({'a tenth more than nf4 takes' if memory is None else 'what is left'}: {format_bytes(room)}), chosen by the damage measured on "
        f"{plural(damages.tokens, 'token')}: about {damage:.2g} nats a token, {damages.total('nf4'):.2g} with nf4 everywhere"
    )
    return Mixture(
        storage,
        tuple(
            LayerStorage(
                layer.module, chosen[layer.module], layer.moments if chosen[layer.module] in FITTED else ""
            )
            for layer in damages.layers
            if chosen[layer.module] != storage
        ),
        policy.double_quant and storage == "nf4",
        choice.bytes,
        damage,
        reason,
    )


def base_bytes(damages: Damages, policy: PrecisionPolicy, parameters: int) -> int:
    """Return the bytes of a base's weights under a policy, as counted by `base_memory`."""
    weights = sum(layer.rows * layer.columns for layer in damages.layers)
    layers = sum(
        layer.bytes(policy.storage_of(layer.module), double_quant=policy.double_quant)
        for layer in damages.layers
    )
    return layers + (parameters - weights) * policy.plain.itemsize


def _most(chosen: Mapping[str, str], plain: str) -> str:
    """Return the model's nominal format: nf4 if any layer has 4 bits, since libraries query the bits of a model."""
    forms = set(chosen.values())
    return "nf4" if forms & set(FITTED) else "int8" if "int8" in forms else plain
