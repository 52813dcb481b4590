"""Mixed storage: each linear layer's format by what it does to the model's output, within the bytes there are."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError
from isotype.core.formats import FITTED, FOUR_BITS, QUANTIZATIONS
from isotype.core.names import plural
from isotype.core.units import format_bytes
from isotype.precision.damages import Damages
from isotype.precision.decide import PrecisionRequest
from isotype.precision.policy import LayerStorage, PrecisionPolicy

_SUMS = 1 << 15
"""Sums of bytes that are told apart: 1/32768 of the room is lost in rounding at most for each layer."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store a layer: its bytes, and what it does to the model's output."""

    bytes: int
    damage: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Options that were chosen.

    Attributes:
        options: index of each layer's option.
        bytes: sum of their bytes.
        damage: sum of their damages.
        bound: no choice that fits has less damage than this; `damage` itself where the choice is exact.
    """

    options: tuple[int, ...]
    bytes: int
    damage: float
    bound: float


def choose(layers: Sequence[Sequence[Option]], room: int, *, sums: int = _SUMS) -> Choice | None:
    """Return the options, one a layer, of least damage within `room` bytes; None if even the smallest do not
    fit.

    Args:
        layers: the options of each layer.
        room: bytes that all of them together may take.
        sums: sums of bytes that are told apart, at least 1.
    """
    least = [min(option.bytes for option in options) for options in layers]
    spare = room - sum(least)
    if spare < 0:
        return None
    extra = [[option.bytes - low for option in options] for options, low in zip(layers, least, strict=True)]
    step = math.gcd(*(each for options in extra for each in options)) or 1
    most = min(spare, sum(max(options) for options in extra))
    exact = most // step < sums
    if not exact:
        step = math.ceil(most / (sums - 1)) if sums > 1 else most + 1
    steps = [[math.ceil(each / step) for each in options] for options in extra]
    picked = _table(layers, steps, most // step)
    relaxed, greedy = _relaxed(layers, extra, spare)
    if not exact and _damage(layers, greedy) < _damage(layers, picked):
        picked = greedy
    damage = _damage(layers, picked)
    return Choice(
        tuple(picked),
        sum(options[at].bytes for options, at in zip(layers, picked, strict=True)),
        damage,
        damage if exact else min(relaxed, damage),
    )


def _damage(layers: Sequence[Sequence[Option]], picked: Sequence[int]) -> float:
    return math.fsum(options[at].damage for options, at in zip(layers, picked, strict=True))


def _table(layers: Sequence[Sequence[Option]], steps: Sequence[Sequence[int]], room: int) -> list[int]:
    """Indices of the best options within `room` steps, by dynamic programming."""
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


def _relaxed(
    layers: Sequence[Sequence[Option]], extra: Sequence[Sequence[int]], spare: int
) -> tuple[float, list[int]]:
    """Return the least damage where a layer may be stored by parts in two formats, and the choice in which
    the last one is not.

    Steps between neighbours on the lower convex hull of each layer's options, the steepest first.
    """
    picked, steps = [], []
    for layer, (options, sizes) in enumerate(zip(layers, extra, strict=True)):
        hull = _hull(options, sizes)
        picked.append(hull[0])
        for before, after in itertools.pairwise(hull):
            gain, cost = options[before].damage - options[after].damage, sizes[after] - sizes[before]
            steps.append((gain / cost, gain, cost, layer, before, after))
    bound, full = _damage(layers, picked), False
    for _, gain, cost, layer, before, after in sorted(steps, key=lambda step: -step[0]):
        part = min(1.0, spare / cost)
        if not full:
            bound -= gain * part
        full = full or part < 1.0
        if cost <= spare and picked[layer] == before:
            picked[layer], spare = after, spare - cost
    return bound, picked


def _hull(options: Sequence[Option], sizes: Sequence[int]) -> list[int]:
    """Indices of the options on the lower convex hull of (bytes, damage), from the smallest on."""
    hull: list[int] = []
    for at in sorted(range(len(options)), key=lambda each: (sizes[each], options[each].damage)):
        if hull and options[at].damage >= options[hull[-1]].damage:
            continue
        while len(hull) > 1 and _slope(options, sizes, hull[-2], hull[-1]) <= _slope(
            options, sizes, hull[-1], at
        ):
            hull.pop()
        hull.append(at)
    return hull


def _slope(options: Sequence[Option], sizes: Sequence[int], first: int, second: int) -> float:
    """Damage taken away by a byte."""
    return (options[first].damage - options[second].damage) / (sizes[second] - sizes[first])


_TENTH = 10
"""Part of nf4's bytes that come on top where nobody says how many there are."""


@dataclass(frozen=True)
class Mixture:
    """What was decided.

    Attributes:
        storage: format of most layers: one of 4 bits where there is any such.
        layers: those in another format.
        double_quant: whether the constants of 4 bits are quantized, too.
        bytes: of all layers.
        damage: nats a token, estimated.
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
            quantized_parts="all",  # each layer by its damage
        )


def first_request(request: PrecisionRequest) -> PrecisionRequest:
    """The request by which everything but the layers' formats is decided: constants are quantized, which costs next to nothing."""
    nested = True if request.double_quant is None else request.double_quant
    return replace(request, quantization="nf4", double_quant=nested, base_memory=None)


def as_decided(request: PrecisionRequest, policy: PrecisionPolicy) -> PrecisionRequest:
    """Return the request for the base that a policy has, mixed or not."""
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
    """`policy` with the moments that `saved` has for the same layers in the same formats: a run goes on with the constants of 4 bits
    that it was begun with, whatever was measured since."""
    if saved is None or policy.layer_formats != saved.layer_formats:
        return policy
    return replace(policy, layers=saved.layers)


def mix(damages: Damages, policy: PrecisionPolicy, parameters: int, memory: int | None = None) -> Mixture:
    """Return the format of each layer of least damage: nf4 in blocks of 64 or 32 with fitted constants, int8,
    or unquantized.

    Args:
        damages: measured of the model.
        policy: in which all layers are nf4.
        parameters: number of the model's parameters, those of layers included.
        memory: bytes that the base's weights take at most; None: a tenth more for the layers than nf4
            takes.

    Raises:
        PrecisionError: the smallest formats take more.
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
    """Bytes of a base's weights under a policy: what `base_memory` counts."""
    weights = sum(layer.rows * layer.columns for layer in damages.layers)
    layers = sum(
        layer.bytes(policy.storage_of(layer.module), double_quant=policy.double_quant)
        for layer in damages.layers
    )
    return layers + (parameters - weights) * policy.plain.itemsize


def _most(chosen: Mapping[str, str], plain: str) -> str:
    """The format that the model is said to be stored in: nf4 where any layer has 4 bits, for libraries ask how many bits a model has."""
    forms = set(chosen.values())
    return "nf4" if forms & set(FITTED) else "int8" if "int8" in forms else plain
