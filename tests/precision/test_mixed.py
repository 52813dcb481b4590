"""The choice of formats against all choices there are."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from isotype.precision.damages import Option, choose

OPTIONS = st.lists(st.builds(Option, st.integers(0, 60), st.floats(0, 10)), min_size=1, max_size=4)
LAYERS = st.lists(OPTIONS, min_size=1, max_size=5)


def best(layers: list[list[Option]], room: int) -> float:
    sums = (
        math.fsum(option.damage for option in options)
        for options in itertools.product(*layers)
        if sum(option.bytes for option in options) <= room
    )
    return min(sums, default=math.inf)


def damage_within(room: int, choice: list[int], layers: list[list[Option]]) -> float:
    picked = [options[at] for options, at in zip(layers, choice, strict=True)]
    assert sum(option.bytes for option in picked) <= room
    return math.fsum(option.damage for option in picked)


@given(LAYERS, st.integers(0, 320))
@settings(max_examples=60)
def test_the_best_of_all_choices(layers: list[list[Option]], room: int) -> None:
    choice = choose(layers, room)
    least = best(layers, room)
    if choice is None:
        assert least == math.inf
        return
    assert math.isclose(damage_within(room, choice, layers), least, abs_tol=1e-12)


@given(LAYERS, st.integers(0, 320), st.integers(1, 12))
@settings(max_examples=60)
def test_where_sums_are_rounded_it_fits_and_less_room_takes_no_less_damage(
    layers: list[list[Option]], room: int, sums: int
) -> None:
    choice = choose(layers, room, sums=sums)
    least = best(layers, room)
    if choice is None:
        assert least == math.inf
        return
    damage = damage_within(room, choice, layers)
    # Each layer's bytes are rounded up by less than a step.
    smallest = sum(min(option.bytes for option in options) for options in layers)
    lost = len(layers) * ((room - smallest) // max(sums - 1, 1) + 1)
    assert least - 1e-9 <= damage <= best(layers, max(smallest, room - lost)) + 1e-9


def test_bytes_of_models_leave_few_sums() -> None:
    # 200 layers of 8B shapes: what is chosen among 4 bits, 8 bits and 16 is exact.
    shapes = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)] * 50
    layers = [
        [Option(rows * columns * bits // 16, 1 / (at + 1) / bits**2) for bits in (9, 16, 32)]
        for at, (rows, columns) in enumerate(shapes)
    ]
    room = int(1.1 * sum(options[0].bytes for options in layers))
    choice = choose(layers, room)
    assert choice is not None
    assert choice == choose(layers, room, sums=1 << 16)
    assert damage_within(room, choice, layers) > 0
