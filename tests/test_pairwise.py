"""The coverings hold every pair, are always the same, and leave the rest reachable."""

from __future__ import annotations

from itertools import product

import pytest

from tests.pairwise import covering, pairs_of, pairwise


@pytest.mark.parametrize(
    ("sizes", "most"), [((10, 3, 4, 2), 44), ((4, 2, 3), 12), ((2, 6, 3), 18), ((2, 2, 2), 5)]
)
def test_every_pair_is_held_by_few_rows(sizes, most):
    rows = covering(sizes)
    every = product(*map(range, sizes))
    assert set().union(*map(pairs_of, rows)) == set().union(*map(pairs_of, every))
    assert len(rows) <= most
    assert rows == covering(sizes)


def test_the_rest_of_the_product_is_marked():
    (names, given) = pairwise("a, b, c", "xy", (1, 2), (None, (3, 4))).args
    assert names == ["a", "b", "c"]
    assert [each.id for each in given][:2] == ["x-1-None", "x-1-3-4"]
    assert len(given) == 8
    run = [each.values for each in given if not each.marks]
    assert 4 <= len(run) <= 5
    assert {each.marks[0].name for each in given if each.marks} == {"exhaustive"}
