"""The search for the largest number that fits, and the moment with the highest memory."""

from __future__ import annotations

import random

from isotype.planning.steps import largest


def test_the_largest_of_a_convex_measure_is_found_in_few_measures() -> None:
    draw = random.Random(0)
    counts = []
    for _ in range(2000):
        moments = [
            (draw.uniform(0, 100), draw.choice([0, 20, 500]) * draw.random(), draw.choice([0, 0, 0.1]))
            for _ in range(draw.randint(1, 4))
        ]
        measured: list[int] = []

        def measure(
            number: int, moments: list[tuple[float, ...]] = moments, measured: list[int] = measured
        ) -> int:
            measured.append(number)
            return int(2**20 * max(a + b * number + c * number**2 for a, b, c in moments))

        high = draw.randint(1, 300)
        low, room = draw.randint(1, high), 2**20 * draw.randint(0, 2000)
        most = largest(measure, high, room, low, high_first=draw.random() < 0.5)
        counts.append(len(measured))
        fitting = [number for number in range(low, high + 1) if measure(number) <= room]
        assert most == (fitting[-1] if fitting else None)
    assert sum(counts) / len(counts) < 3


def test_a_step_in_proportion_takes_three_measures() -> None:
    measured: list[int] = []
    assert largest(lambda rows: measured.append(rows) or 10 * rows, 64, 205, high_first=False) == 20  # type: ignore[func-returns-value]
    assert len(measured) == 3


def test_the_search_ends_where_the_rest_is_of_no_interest() -> None:
    measured: list[int] = []
    rows = largest(
        lambda rows: measured.append(rows) or rows,  # type: ignore[func-returns-value]
        8,
        5,
        enough=lambda low, high: -(-8 // low) == -(-8 // (high - 1)),
    )
    assert rows in (4, 5)
