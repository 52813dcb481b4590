"""Errors in words."""

from __future__ import annotations

from isotype.core.errors import Problem, UsageError


def test_a_single_problem() -> None:
    error = UsageError.of("no such thing", "a thing", "another", "give another", hint="or none")
    assert type(error) is UsageError
    assert str(error) == str(
        UsageError("no such thing", [Problem("a thing", "another", "give another")], "or none")
    )
