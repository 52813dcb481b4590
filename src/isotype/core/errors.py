"""Errors that isotype raises on purpose: what was given, what was expected, how to fix it.

An error lists all problems at once, so that a setup is not fixed one message at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Problem:
    """A problem: the value in the user's terms (flag, path, column, dtype), the expected one, and the fix."""

    given: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"{self.given}\n    expected  {self.expected}\n    fix       {self.fix}"


class IsotypeError(Exception):
    """Base of all errors raised on purpose; the command line shows them without a traceback.

    Attributes:
        headline: one line that states the fact.
        problems: all problems found.
        hint: an alternative that works, or None.
    """

    exit_code = 2

    def __init__(self, headline: str, problems: Sequence[Problem] = (), hint: str | None = None) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        self.hint = hint
        super().__init__(str(self))

    @classmethod
    def of(cls, headline: str, given: str, expected: str, fix: str, *, hint: str | None = None) -> Self:
        """Return the error of a single problem, see `Problem`."""
        return cls(headline, [Problem(given, expected, fix)], hint)

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"  - {problem}" for problem in self.problems]
        if self.hint:
            lines.append(f"  = {self.hint}")
        return "\n".join(lines)


class PrecisionError(IsotypeError):
    """Dtypes that are incompatible with one another, the device or the libraries."""


class CheckpointError(IsotypeError):
    """A checkpoint that is missing, incomplete, of the wrong shape or not a checkpoint."""


class DataError(IsotypeError):
    """A data set that is missing, empty or malformed, or that lacks a column."""


class UsageError(IsotypeError):
    """Incompatible arguments."""


class TrainingError(IsotypeError):
    """Training failed: its loss or weights are not finite, or a reward function raised."""

    exit_code = 1


class SaveError(IsotypeError):
    """A file could not be written; existing files are unchanged."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its class name if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; its class name if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
