"""The coverings hold every pair, are always the same, and leave the rest reachable."""

from __future__ import annotations

from itertools import product

import pytest

from tests.pairwise import covering, few, pairwise, parts_of


@pytest.fixture(autouse=True)
def _rest(monkeypatch):
    monkeypatch.setattr("tests.pairwise.rest_is_made", True)


@pytest.mark.parametrize(
    ("sizes", "most"), [((10, 3, 4, 2), 44), ((4, 2, 3), 12), ((2, 6, 3), 18), ((2, 2, 2), 5)]
)
def test_every_pair_is_held_by_few_rows(sizes, most):
    rows = covering(sizes)
    every = product(*map(range, sizes))
    assert set().union(*map(parts_of, rows)) == set().union(*map(parts_of, every))
    assert len(rows) <= most
    assert rows == covering(sizes)


@pytest.mark.parametrize("sizes", [(10, 3, 4), (2, 2), (5,)])
def test_every_value_is_in_as_many_rows_as_the_longest_axis_has_values(sizes):
    rows = covering(sizes, 1)
    assert len(rows) == max(sizes)
    assert [{row[axis] for row in rows} for axis in range(len(sizes))] == [set(range(size)) for size in sizes]


def test_the_rest_of_the_product_is_marked():
    (names, given) = pairwise("a, b, c", "xy", (1, 2), (None, (3, 4))).args
    assert names == ["a", "b", "c"]
    assert [each.id for each in given][:2] == ["x-1-None", "x-1-3-4"]
    assert len(given) == 8
    run = [each.values for each in given if not each.marks]
    assert 4 <= len(run) <= 5
    assert {each.marks[0].name for each in given if each.marks} == {"exhaustive"}


def test_axes_of_several_arguments_and_values_with_marks():
    later = pytest.param("c", marks=pytest.mark.exhaustive)
    here = pytest.param("b", marks=pytest.mark.lacking("no b"), id="B")
    (names, params) = pairwise(["x, y", "z"], [(1, 2), (3, 4)], ["a", here, later], strength=1).args
    assert names == ["x", "y", "z"]
    assert [each.id for each in params] == ["1-2-a", "1-2-B", "1-2-c", "3-4-a", "3-4-B", "3-4-c"]
    assert [each.values for each in params][:2] == [(1, 2, "a"), (1, 2, "b")]
    marks = {each.id: [mark.name for mark in each.marks] for each in params}
    assert marks == {
        "1-2-a": [],
        "1-2-B": ["lacking", "exhaustive"],
        "1-2-c": ["exhaustive"],
        "3-4-a": ["exhaustive"],
        "3-4-B": ["lacking"],
        "3-4-c": ["exhaustive"],
    }


def test_a_few_of_many_values():
    def marked(*arguments):
        names, params = few(*arguments).args
        return names, {each.id: (each.values, [mark.name for mark in each.marks]) for each in params}

    values = {"one": (1, 2), "two": (3, 4)}
    assert marked("x, y", values, "two") == (
        ["x", "y"],
        {"one": ((1, 2), ["exhaustive"]), "two": ((3, 4), [])},
    )
    assert marked("x", [None, 5], None) == (["x"], {"None": ((None,), []), "5": ((5,), ["exhaustive"])})
    with pytest.raises(AssertionError, match="three"):
        few("x", ["one", "two"], "three")
