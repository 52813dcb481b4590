"""The records of the training methods, and that nothing outside of them asks for a method by its name."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

import isotype
from isotype.data.methods import METHODS

SOURCE = Path(isotype.__file__).parent


@pytest.mark.parametrize(
    ("method", "beta", "compares"),
    [
        ("sft", None, False),
        ("reward", None, False),
        ("dpo", 0.1, True),
        ("kto", 0.0, True),
        ("grpo", 0.0, False),
        ("grpo", 0.04, True),
        ("rloo", 0.05, True),
        ("rloo", 0.0, False),
    ],
)
def test_a_reference_model_is_there_where_the_loss_has_one(
    method: str, beta: float | None, compares: bool
) -> None:
    arguments = SimpleNamespace() if beta is None else SimpleNamespace(beta=beta)
    assert METHODS[method].compares(arguments) is compares


def test_methods_are_told_apart_by_their_records_alone() -> None:
    """Only data/methods.json has their names. `"sft"` is the default of a bare model, and "reward" a word of its own."""
    names = METHODS.keys() - {"sft", "reward"}
    named = [
        (file.relative_to(SOURCE).as_posix(), node.value)
        for file in SOURCE.rglob("*.py")
        if any(f'"{name}"' in (text := file.read_text(encoding="utf-8")) for name in names)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert named == []
