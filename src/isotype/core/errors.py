"""Errors that isotype raises on purpose. An error lists all problems, each with the given value, the expected value, and a fix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

_SHOWN = 10


@dataclass(frozen=True)
class Problem:
    """A value in the user's words (flag, path, column, dtype), the expected value, and a fix.

    Attributes:
        swap: (words of the command line, words that replace them); None if isotype does not know the replacement.
    """

    given: str
    expected: str
    fix: str
    swap: tuple[Sequence[str], Sequence[str]] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.given}\n    expected  {self.expected}\n    fix       {self.fix}"


class IsotypeError(Exception):
    """Base class of the errors that isotype raises on purpose. Commands print them without a traceback.

    Attributes:
        headline: one line that states the fact.
        problems: all problems, in the order in which they are printed.
        hint: a last line with an alternative or the next command, or None.
    """

    exit_code = 2

    def __init__(self, headline: str, problems: Sequence[Problem] = (), hint: str | None = None) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        self.hint = hint
        super().__init__(str(self))

    @classmethod
    def of(cls, headline: str, given: str, expected: str, fix: str, *, hint: str | None = None) -> Self:
        """Return an error with one `Problem`."""
        return cls(headline, [Problem(given, expected, fix)], hint)

    @classmethod
    def first_of(cls, headline: str, problems: Sequence[Problem]) -> Self:
        """Return an error with the first ten problems. The hint says how many more problems there are."""
        more = len(problems) - _SHOWN
        hint = f"{more} more {'problem' if more == 1 else 'problems'} not shown" if more > 0 else None
        return cls(headline, problems[:_SHOWN], hint)

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"  - {problem}" for problem in self.problems]
        if self.hint:
            lines.append(f"  = {self.hint}")
        return "\n".join(lines)


class PrecisionError(IsotypeError):
    """Dtypes do not fit each other, the device, or the installed libraries."""


class CheckpointError(IsotypeError):
    """A checkpoint is missing, is incomplete, or has wrong shapes; or a path is not a checkpoint."""


class DataError(IsotypeError):
    """A data set is missing, empty or malformed, or lacks a column."""


class UsageError(IsotypeError):
    """Arguments are invalid or cannot be combined."""


class TrainingError(IsotypeError):
    """Training failed: the loss or weights are not finite, or a reward function raised an error."""

    exit_code = 1


class SaveError(IsotypeError):
    """A file could not be written; existing files are unchanged."""

    exit_code = 1


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and the exceptions that caused it."""
    visited: list[BaseException] = []
    while error is not None and error not in visited:
        visited.append(error)
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def error_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message: `ValueError: …`."""
    return f"{type(error).__name__}: {first_line(error)}"


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line; the name of its class if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
