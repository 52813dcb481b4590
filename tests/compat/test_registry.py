"""The records of `isotype.compat.registry`: complete, with a test each, and the page that is written from them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tools.compat_page import PAGE, page
from tools.patches import patched

from isotype.compat.registry import PATCHES


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(PATCHES), "python -m tools.compat_page"


def test_every_place_has_a_test_that_exists_and_a_module_that_does_it() -> None:
    assert [each.name for each in patched(Path(__file__).parents[1]) if not each.test] == []
    assert [patch.where for patch in PATCHES if find_spec(patch.where) is None] == []


def test_what_is_changed_says_how_it_is_put_back() -> None:
    assert [
        patch.name
        for patch in PATCHES
        if patch.kind != "read" and not patch.restored and "_should_skip" not in patch.name
    ] == []
    names = [patch.name for patch in PATCHES]
    assert len(set(names)) == len(names)
