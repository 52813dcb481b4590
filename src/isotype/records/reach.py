"""Which inputs of a step reach which outputs: what was measured on a small copy of the model, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal[
    "packed row",  # the tokens of a sequence that is packed into the same row
    "other row",  # the tokens of another row of the batch
    "padding",  # the tokens that the attention mask leaves out
    "padding position",  # the number of padding tokens before a row
    "later token",  # a token behind the one whose next token is predicted
    "own label",  # the label that is predicted, as an input of the model
]
"""What reaches a prediction that must not depend on it."""

Unused = Literal["input", "picture", "adapter", "weight", "count"]
"""What reaches no prediction, although it is there to."""


@dataclass(frozen=True)
class Leak:
    """Predictions that depend on what they must not depend on.

    Attributes:
        source: what was changed.
        row, column: of the first prediction that changed.
        changed: how many predictions changed.
        of: how many were compared.
        largest: the largest change of a logit, relative to the largest logit.
        module, kind: name and class of the first module whose inputs agree where its outputs change; "" if none is seen.
        without: the input without which nothing changes any more, on the same copy; "" if none was tried or helps.
    """

    source: Source
    row: int
    column: int
    changed: int
    of: int
    largest: float
    module: str = ""
    kind: str = ""
    without: str = ""


@dataclass(frozen=True)
class NoReach:
    """Something that is there to change the predictions and changes none.

    Attributes:
        kind: what it is.
        name: of the input, or of the parameters (with `*` for the numbers of layers).
        why: in words, where that is known; else "".
    """

    kind: Unused
    name: str
    why: str = ""


@dataclass(frozen=True)
class Labels:
    """Which labels are learned.

    Attributes:
        learned: predictions that the loss depends on.
        shift: how many tokens a label is ahead of the prediction that it is compared with, of labels that repeat the
            inputs: 1 in a causal model; None where labels are something else.
        at_padding: labels of tokens that the attention mask leaves out.
        at_pictures: labels of tokens that stand for pictures.
    """

    learned: int
    shift: int | None = None
    at_padding: int = 0
    at_pictures: int = 0


@dataclass(frozen=True)
class Matrix:
    """Which tokens of a row reach which of its predictions.

    Attributes:
        row: of the batch.
        sequences: the sequence that each token belongs to, -1 of padding.
        reached: (column of a prediction, columns of the tokens that reach it).
    """

    row: int
    sequences: tuple[int, ...]
    reached: tuple[tuple[int, tuple[int, ...]], ...]

    def meant(self, column: int, token: int) -> bool:
        """Whether the token may reach the prediction at `column` of a causal model."""
        return token <= column and self.sequences[token] == self.sequences[column]


@dataclass(frozen=True)
class Reach:
    """What was measured of one batch.

    Attributes:
        copy: the copy of the model that it was measured on, in words.
        rows, tokens: of the batch as it was measured.
        labels: which are learned; None where the model returns no logits.
        leaks: predictions that depend on what they must not depend on.
        unused: what changes no prediction.
        undecided: what could not be measured, and why, a clause each.
        matrix: the tokens that reach some predictions of one row; None where that was not measured.
    """

    copy: str
    rows: int
    tokens: int
    labels: Labels | None = None
    leaks: tuple[Leak, ...] = ()
    unused: tuple[NoReach, ...] = ()
    undecided: tuple[str, ...] = ()
    matrix: Matrix | None = None

    def leak(self, *sources: Source) -> Leak | None:
        """The first leak from one of `sources`."""
        return next((leak for leak in self.leaks if leak.source in sources), None)
