"""The entries of docs/compat.md: complete, of modules that exist, with a test each."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tools.patches import Entry, entries, patched

ENTRIES = tuple(entries())
_WHAT = re.compile(r".+ \((?:read|replaced|overridden|swapped), in `(isotype\.compat\.\w+)`\)")
_WHY = re.compile(r".+ \(\[source\]\(https://\S+\)\)")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_is_complete_and_names_a_module_that_does_it(entry: Entry) -> None:
    assert [*entry.lines] == ["What", "Why", "When", "Undone", "Tested with", "Test"]
    what = _WHAT.fullmatch(entry.lines["What"])
    assert what
    assert find_spec(what[1])
    assert _WHY.fullmatch(entry.lines["Why"])


def test_every_place_has_a_name_of_its_own_and_a_test_that_exists() -> None:
    assert [each.name for each in patched(Path(__file__).parents[1]) if not each.test] == []
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names) > 30


def test_what_is_changed_says_how_it_is_put_back() -> None:
    assert [
        entry.name
        for entry in ENTRIES
        if "(read, in " not in entry.lines["What"]
        and entry.lines["Undone"] == "nothing is changed"
        and "_should_skip" not in entry.name
    ] == []
