"""No more idioms in docstrings, messages, pages and names than tools/plain_english.py allows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tools import plain_english
from tools.plain_english import ROOT, Idiom, counts, excess, idioms
from tools.sources import read_sources

FILE = '''
"""What a room is for; None where nobody enters."""
def sums(each, rows):
    """Sum the rows."""
    own = f"the file of which {each} lies elsewhere"
    for name in ("nobody", "lies"):
        own += name
    return own
'''


@pytest.mark.exhaustive  # `make static` runs the same
def test_idioms_are_no_more_than_allowed() -> None:
    assert excess(idioms(read_sources()), where=True) == []


def test_idioms_of_a_file_are_counted_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "isotype").mkdir()
    (tmp_path / "isotype" / "room.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "README.md").write_text("The key lies\nhere.", encoding="utf-8")
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    result = idioms(read_sources(tmp_path))
    assert counts(result) == {
        ("docstrings", "What, Whether, One, How first"): 1,
        ("docstrings", "None where"): 1,
        ("docstrings", "nobody"): 1,
        ("messages", "of which"): 1,
        ("messages", "lie for be"): 1,
        ("names", "each"): 1,
        ("names", "own"): 2,
        ("pages", "lie for be"): 1,
    }
    assert [idiom.where for idiom in result if idiom.place == "pages"] == ["README.md:1"]


def _faults(docstring: str) -> list[str]:
    """Return the lines of a docstring that break its sections, and a first sentence that the second one repeats."""
    section, faults = False, []
    for line in docstring.splitlines():
        name, colon, rest = line.partition(":")
        heads = bool(colon) and name in ("Args", "Attributes", "Returns", "Raises", "Yields")
        if (heads and rest) or (section and not heads and line.strip() and not line.startswith("    ")):
            faults.append(line)
        section = section or heads
    first, _, others = " ".join(docstring.split()).partition(". ")
    return faults + [first] * bool(first and others.startswith(first))


def test_docstrings_have_whole_sections_and_no_sentence_twice() -> None:
    faults = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                faults += [f"{path.name}: {fault}" for fault in _faults(ast.get_docstring(node) or "")]
    assert faults == []


def test_a_count_above_its_ceiling_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_english, "CEILINGS", {("pages", "nobody"): 1})
    first, second = (Idiom("pages", "nobody", f"README.md:{line}") for line in (3, 5))
    other = Idiom("names", "own", "core/names.py:1")
    monkeypatch.setitem(plain_english.CEILINGS, ("names", "own"), 1)
    assert excess([first, other], where=True) == []
    line = "nobody in pages: 2, at most 1 allowed"
    assert excess([first, other, second]) == [line]
    assert excess([first, other, second], where=True) == [line, "  README.md:3", "  README.md:5"]
