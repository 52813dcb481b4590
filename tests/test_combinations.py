"""docs/combinations.md: every pair of options trains a step, or is refused with the message that the page has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.combinations import PAGE, page

from tests.combinations import AXES, PAIRS, key, measured, recorded

USUAL = {
    ("dpo", "nf4"),
    ("kto", "packing"),
    ("int8", "all weights"),
    ("DoRA", "experts"),
    ("reward", "images"),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=key(pair), marks=[] if pair in USUAL else [pytest.mark.exhaustive])
        for pair in PAIRS
    ],
)
def test_a_pair_trains_or_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    assert measured(pair, tmp_path) == recorded()[key(pair)]


def test_the_page_is_that_of_the_record() -> None:
    assert set(recorded()) == {key(pair) for pair in PAIRS}
    assert set(PAIRS) >= USUAL
    assert PAGE.read_text(encoding="utf-8") == page(recorded()), "run `python -m tools.combinations`"


def test_no_value_is_in_two_axes() -> None:
    values = [value for axis in AXES.values() for value in axis]
    assert len(set(values)) == len(values)
