"""The entries of docs/compat.md, and whether the test that each names exists.

python -m tools.patches: prints these tests, for pytest
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.sources import ROOT

PAGE = ROOT / "docs" / "compat.md"


@dataclass(frozen=True)
class Entry:
    """One place. `lines`: its lines by their first words, as `Undone`."""

    name: str
    library: str
    lines: Mapping[str, str]

    @property
    def test(self) -> str:
        """The test that tells when the entry is no longer needed or no longer fits, as pytest names it."""
        return self.lines.get("Test", "").strip("`")

    @property
    def last_tried(self) -> str:
        """The newest version that it was tried with, as `1.16`."""
        return self.lines["Tested with"].rpartition(" ")[2]


@dataclass(frozen=True)
class Patched:
    """One place: its name and its test, "" if there is none."""

    name: str
    test: str


def entries(page: Path = PAGE) -> Iterator[Entry]:
    """Every entry of the page, in its order."""
    for part in page.read_text(encoding="utf-8").split("\n## ")[1:]:
        library, *places = part.split("\n### ")
        for place in places:
            name, *lines = filter(None, place.splitlines())
            pairs = (line.removeprefix("- ").partition(": ") for line in lines)
            yield Entry(name.replace("\\", ""), library.strip(), {key: text for key, _, text in pairs})


def patched(tests: Path, page: Path = PAGE) -> tuple[Patched, ...]:
    """Every entry of the page, its test if a function of that name stands in `tests`."""
    return tuple(Patched(each.name, each.test if _exists(tests, each.test) else "") for each in entries(page))


def _exists(tests: Path, test: str) -> bool:
    path, _, function = test.partition("::")
    file = tests.parent / path
    if not function or not file.is_file():
        return False
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body)


if __name__ == "__main__":
    print("\n".join(sorted({entry.test for entry in entries()})))
