"""The table of covered branches by room: its sums, its order, and what is no report of them."""

from __future__ import annotations

from typing import Any

import pytest
from tools.coverage_table import Counts, by_room, table
from tools.sources import PACKAGE, SOURCE


def report(*files: tuple[str, tuple[int, int, int, int]], branches: bool = True) -> dict[str, Any]:
    names = ("num_statements", "covered_lines", "num_branches", "covered_branches")
    return {
        "meta": {"branch_coverage": branches},
        "files": {place: {"summary": dict(zip(names, numbers, strict=True))} for place, numbers in files},
    }


FILES = (
    ("src/isotype/__init__.py", (10, 10, 0, 0)),
    ("src/isotype/lora/fuse.py", (100, 90, 20, 19)),
    ("src/isotype/lora/loss/softmax.py", (50, 50, 10, 5)),
    ("src/isotype/core/names.py", (40, 10, 8, 2)),
    ("tests/conftest.py", (1000, 1, 1000, 1)),
)


def test_files_are_summed_by_room_and_others_left_out() -> None:
    assert by_room(report(*FILES)) == {
        "isotype": Counts(10, 10, 0, 0),
        "lora": Counts(150, 140, 30, 24),
        "core": Counts(40, 10, 8, 2),
    }


def test_the_least_covered_room_comes_first_and_the_sum_last() -> None:
    head, names, *rows = table(by_room(report(*FILES)), "abc123").splitlines()
    assert "abc123" in head
    assert names.split() == ["room", "statements", "run", "branches", "taken"]
    assert [row.split() for row in rows] == [
        ["core", "40", "25.0%", "8", "25.0%"],
        ["lora", "150", "93.3%", "30", "80.0%"],
        ["isotype", "10", "100.0%", "0", "100.0%"],
        ["all", "200", "80.0%", "38", "68.4%"],
    ]
    assert len({len(row) for row in rows}) == 1


def test_a_report_without_branches_or_of_something_else_is_an_error() -> None:
    with pytest.raises(ValueError, match="no branches"):
        by_room(report(*FILES, branches=False))
    with pytest.raises(ValueError, match=f"no file below {SOURCE / PACKAGE}"):
        by_room(report(FILES[-1]))
