"""Which layer is stored in which format within so many bytes: a multiple-choice knapsack.

One of several (bytes, damage) is chosen for each layer so that the sum of damages is least and the bytes fit. Dynamic programming over
the bytes beyond the least (Dudzinski and Walukiewicz, Exact methods for the knapsack problem and its generalizations, 1987, section 5)
is exact where their common divisor leaves few enough sums; else they are rounded up to steps, so that a choice always fits, and the
linear relaxation says how far it can be from the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_SUMS = 1 << 15
"""Sums of bytes that are told apart: 1/32768 of the room is lost in rounding at most for each layer."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store a layer: its bytes, and what it does to the model's output."""

    bytes: int
    damage: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

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
    """The options, one a layer, of least damage within `room` bytes; None where even the smallest do not fit.

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
    """The least damage where a layer may be stored by parts in two formats, and the choice in which the last one is not.

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
