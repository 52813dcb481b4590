"""Errors in words."""

from __future__ import annotations

from isotype.core.errors import Problem, UsageError, first_line, one_line


def test_a_single_problem() -> None:
    error = UsageError.of("no such thing", "a thing", "another", "give another", hint="or none")
    assert type(error) is UsageError
    assert str(error) == str(
        UsageError("no such thing", [Problem("a thing", "another", "give another")], "or none")
    )


def test_what_a_library_says_in_one_line() -> None:
    error = ValueError("\n first\n  second ")
    assert (first_line(error), one_line(error)) == ("first", "first second")
    assert (first_line(OSError()), one_line(OSError())) == ("OSError", "OSError")
