"""The row that a goal picks, and the Pareto front."""

from __future__ import annotations

import pytest

from isotype.planning.record import GOALS, Time, front, picked
from tests.planning.rows import row

TOKENS = 512


def timed(seconds: float) -> Time:
    return Time(seconds, seconds / 2, "products", 10)


DENSE = row(storage="bfloat16", time=timed(1.3), peak=9, longest=100)
INT8 = row(storage="int8", time=timed(1.2), peak=7, longest=200)
NF4 = row(storage="nf4", time=timed(1.0), peak=5, longest=900, checkpointing="every layer")
TOO_LARGE = row(storage="float32", time=timed(0.1), peak=99, room=98)
ROWS = (DENSE, INT8, NF4, TOO_LARGE)


@pytest.mark.parametrize(
    ("goal", "wanted"), [("balanced", INT8), ("longest", NF4), ("fastest", NF4), ("best", DENSE)]
)
def test_the_row_of_a_goal(goal: str, wanted: object) -> None:
    assert goal in GOALS
    assert picked(ROWS, goal) is wanted


def test_a_measured_damage_decides_before_the_number_of_bits() -> None:
    codes = (row(storage="int8", damage=0.5, time=timed(1)), row(storage="nf4", damage=0.1, time=timed(1)))
    assert picked(codes, "best") is codes[1]


def test_of_a_damage_that_nobody_has_measured_nothing_is_concluded() -> None:
    codes = (row(storage="int8", damage=0.001, time=timed(1)), row(storage="nf4", time=timed(1)))
    assert picked(codes, "best") is codes[0]


def test_nothing_fits() -> None:
    assert picked([TOO_LARGE], "balanced") is None
    assert picked([], "best") is None


def test_without_rates_the_most_precise_is_taken() -> None:
    unknown = [row(storage=storage, time=None) for storage in ("nf4", "float32", "int8")]
    assert picked(unknown, "balanced") is unknown[1]
    assert picked(unknown, "fastest") is unknown[1]


def test_the_front_has_what_no_other_beats() -> None:
    slow = row(storage="nf4", time=timed(3), peak=6)
    assert front([*ROWS, slow]) == (NF4,)
    small = row(storage="nf4", time=timed(3), peak=1)
    assert front([*ROWS, small]) == (small, NF4)


def test_sharded_weights_are_gathered_as_seldom_as_can_be() -> None:
    often = row(sharding="FSDP2", accumulation=8, time=timed(1))
    seldom = row(sharding="FSDP2", accumulation=2, time=timed(3), checkpointing="every layer")
    assert picked([often, seldom], "fastest") is seldom
    whole = row(sharding="DDP", accumulation=8, time=seldom.time, rows=seldom.rows // 2 or 1)
    assert picked([often, whole], "fastest") is often


def test_of_two_that_are_as_fast_the_one_that_gathers_nothing() -> None:
    sharded = row(sharding="FSDP2", time=timed(1), peak=1)
    whole = row(sharding="DDP", time=timed(1), peak=2)
    for goal in ("balanced", "fastest", "best"):
        assert picked([sharded, whole], goal) is whole
