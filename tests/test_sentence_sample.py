"""Sentences for a reading test come from pages, docstrings and messages, with their places."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import sentence_sample
from tools.sentence_sample import sentences
from tools.sources import read_sources

FILE = '''
"""The door of a room opens twice. It closes once a day, at night."""
def sums(rows):
    """Sum the rows of a table.

        total = sums(rows)  # an example of a call is no sentence either

    Attributes:
        rows: a list of numbers without gaps.
        by: too short.
    """
    key = r"(?:a pattern is no sentence)"
    raise ValueError(f"{len(rows)} rows are too many here")
'''
PAGE = """# A title is no sentence at all

Code is no sentence either:

```python
print("one two three four five six")
```

- The key of the room
  is under the mat.

  ```python
  print("seven eight nine ten eleven twelve")
  ```
"""


def test_sentences_have_kind_place_and_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "isotype").mkdir()
    (tmp_path / "isotype" / "room.py").write_text(FILE, encoding="utf-8")
    for name in ("README.md", "CONTRIBUTING.md"):
        (tmp_path / name).write_text(PAGE if name == "README.md" else "", encoding="utf-8")
    monkeypatch.setattr(sentence_sample, "ROOT", tmp_path)
    assert [
        (drawn.kind, drawn.where, drawn.holder, drawn.text) for drawn in sentences(read_sources(tmp_path))
    ] == [
        ("docstring", "isotype/room.py:2", "isotype.room", "The door of a room opens twice."),
        ("docstring", "isotype/room.py:2", "isotype.room", "It closes once a day, at night."),
        ("docstring", "isotype/room.py:4", "sums", "Sum the rows of a table."),
        ("docstring", "isotype/room.py:9", "sums", "rows: a list of numbers without gaps."),
        ("message", "isotype/room.py:13", "isotype.room", "{len(rows)} rows are too many here"),
        ("page", "README.md:3", "README.md", "Code is no sentence either:"),
        ("page", "README.md:9", "README.md", "The key of the room is under the mat."),
    ]


def test_sentences_have_the_signature_and_the_sentence_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "isotype").mkdir()
    (tmp_path / "isotype" / "room.py").write_text(FILE, encoding="utf-8")
    for name in ("README.md", "CONTRIBUTING.md"):
        (tmp_path / name).write_text("", encoding="utf-8")
    monkeypatch.setattr(sentence_sample, "ROOT", tmp_path)
    assert [(drawn.signature, drawn.before) for drawn in sentences(read_sources(tmp_path))] == [
        ("", ""),
        ("", "The door of a room opens twice."),
        ("def sums(rows)", ""),
        ("def sums(rows)", ""),
        ("", ""),
    ]
