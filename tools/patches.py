"""The records of `isotype.compat` as they stand in its sources, and whether the test that each names exists."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from tools.sources import SOURCE

COMPAT = SOURCE / "isotype" / "compat"


@dataclass(frozen=True)
class Patched:
    """One place: its name, and the test that tells when it is no longer needed or no longer fits, "" where there is none."""

    name: str
    test: str


def patched(tests: Path, compat: Path = COMPAT) -> tuple[Patched, ...]:
    """Every `Patch(…)` of the files in `compat`, its test where a function of that name stands in `tests`."""
    return tuple(
        Patched(fields["name"], fields["test"] if _exists(tests, fields["test"]) else "")
        for path in sorted(compat.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Patch"
        for fields in [{str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}]
    )


def _exists(tests: Path, test: str) -> bool:
    path, _, function = test.partition("::")
    file = tests.parent / path
    if not function or not file.is_file():
        return False
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body)
