"""Every error that isotype raises on purpose: what was given, what was expected, what to do.

An error carries all problems found at once, so that nobody fixes a set-up one message at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        given: what was found, in the user's own words (flag, path, column, dtype).
        expected: what would have been right.
        fix: what to do about it.
    """

    given: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"{self.given}\n    expected  {self.expected}\n    fix       {self.fix}"


class IsotypeError(Exception):
    """Base of all errors raised on purpose; the command line shows them without a traceback.

    Attributes:
        headline: one line that states the fact.
        problems: everything that is wrong, found in one go.
        hint: what would work instead, or None.
        exit_code: exit status of the command line.
    """

    exit_code = 2

    def __init__(self, headline: str, problems: Sequence[Problem] = (), hint: str | None = None) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        self.hint = hint
        super().__init__(str(self))

    @classmethod
    def of(cls, headline: str, given: str, expected: str, fix: str, *, hint: str | None = None) -> Self:
        """The error of a single problem, see `Problem`."""
        return cls(headline, [Problem(given, expected, fix)], hint)

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"  - {problem}" for problem in self.problems]
        if self.hint:
            lines.append(f"  = {self.hint}")
        return "\n".join(lines)


class PrecisionError(IsotypeError):
    """Dtypes that cannot work together, or that the device or the libraries cannot run."""


class CheckpointError(IsotypeError):
    """A checkpoint that is missing, incomplete, of the wrong shape or not a checkpoint."""


class DataError(IsotypeError):
    """A data set that is missing, empty, malformed or lacks a column."""


class UsageError(IsotypeError):
    """Arguments that do not fit together."""


class TrainingError(IsotypeError):
    """A training that cannot go on: its loss or its weights are not finite, or a reward function failed."""

    exit_code = 1


class SaveError(IsotypeError):
    """Something could not be written; what was there before is untouched."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """All of an error's message, in one line; its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
