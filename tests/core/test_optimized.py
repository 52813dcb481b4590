"""`python -O` takes asserts away: those of the package tell mypy a type, and guard nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import isotype

SOURCE = Path(isotype.__file__).parent


def narrows(test: ast.expr) -> bool:
    """Whether an expression only says which type something has, and calls nothing but `isinstance`."""
    if isinstance(test, ast.BoolOp):
        return all(map(narrows, test.values))
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
    if isinstance(test, ast.Call):
        return ast.unparse(test.func) == "isinstance" and len(calls) == 1
    against_none = (
        isinstance(test, ast.Compare)
        and [type(each) for each in test.ops] == [ast.IsNot]
        and ast.unparse(test.comparators[0]) == "None"
    )
    walrus = any(isinstance(node, ast.NamedExpr) for node in ast.walk(test))
    return against_none and not calls and not walrus


def guards(text: str) -> list[str]:
    asserts = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert)]
    return [ast.unparse(node) for node in asserts if not narrows(node.test)]


def test_no_assert_guards_what_the_package_does() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    texts = {str(file.relative_to(SOURCE)): file.read_text(encoding="utf-8") for file in files}
    found = {name: guards(text) for name, text in texts.items() if "assert" in text}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("line", "guarding"),
    [
        ("assert x is not None", False),
        ("assert isinstance(x, int) and y.z is not None", False),
        ("assert not missing", True),
        ("assert len(x) == 3", True),
        ("assert (x := f()) is not None", True),
        ("assert f() is not None", True),
    ],
)
def test_what_is_a_guard(line: str, guarding: bool) -> None:
    assert bool(guards(line)) == guarding
