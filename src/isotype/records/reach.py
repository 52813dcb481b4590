"""Dependence of a step's outputs and gradients on its inputs and weights: traced, and measured on a small copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal[
    "packed row",  # the tokens of a sequence that is packed into the same row
    "other row",  # the tokens of another row of the batch
    "padding",  # the tokens that the attention mask leaves out
    "padding position",  # the number of padding tokens before a row
    "later token",  # a token after the predicted one
    "own label",  # the predicted label, as an input of the model
]
"""Inputs that must not change a prediction."""

Unused = Literal["input", "picture", "adapter", "weight", "ungraded", "count"]
"""Inputs and parameters that should change predictions but do not; `ungraded`: not in the loss's graph."""


@dataclass(frozen=True)
class Leak:
    """Predictions that depend on inputs that they must not depend on.

    Attributes:
        source: the changed input.
        row, column: of the first changed prediction.
        changed: number of changed predictions.
        of: number of compared predictions.
        largest: the largest change of a logit, relative to the largest logit.
        module, kind: name and class of the first module with equal inputs and changed outputs; "" if none
            is seen.
        without: the input without which nothing changes on the same copy; "" if none was tried or helps.
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
    """An input or parameter that changes no prediction.

    Attributes:
        kind: its kind.
        name: of the input, or of the parameters (with `*` for layer numbers).
        why: the reason in words; "" if unknown.
    """

    kind: Unused
    name: str
    why: str = ""


@dataclass(frozen=True)
class Labels:
    """The learned labels.

    Attributes:
        learned: number of predictions that the loss depends on.
        shift: tokens by which labels are ahead of their predictions, if they repeat the inputs: 1 in a
            causal model; else None.
        at_padding: labels of tokens that the attention mask leaves out.
        at_pictures: labels of picture tokens.
    """

    learned: int
    shift: int | None = None
    at_padding: int = 0
    at_pictures: int = 0


@dataclass(frozen=True)
class Matrix:
    """The tokens of a row that reach its predictions.

    Attributes:
        row: of the batch.
        sequences: the sequence of each token, -1 for padding.
        reached: (column of a prediction, columns of the tokens that reach it).
    """

    row: int
    sequences: tuple[int, ...]
    reached: tuple[tuple[int, tuple[int, ...]], ...]

    def meant(self, column: int, token: int) -> bool:
        """Return whether the token may reach the prediction at `column` of a causal model."""
        return token <= column and self.sequences[token] == self.sequences[column]


@dataclass(frozen=True)
class Collective:
    """A call that all processes of a sharded training make together.

    Attributes:
        move: `gathers` weights or `reduces` gradients.
        module: sharded module of the weights; "" in the backward.
        elements: of the whole tensor.
    """

    move: str
    module: str
    elements: int

    @property
    def alike(self) -> tuple[str, int]:
        """Equal for calls that can meet."""
        return self.move, self.elements

    def __str__(self) -> str:
        return f"{self.move} {self.elements:,} numbers{f' of {self.module}' if self.module else ''}"


@dataclass(frozen=True)
class Parting:
    """The first collectives that two processes disagree on.

    Attributes:
        process: index of the batch whose collectives differ from the first batch's.
        at: index of the collective in the step.
        first, other: the collectives of the two processes; None after a process's last one.
    """

    process: int
    at: int
    first: Collective | None
    other: Collective | None


@dataclass(frozen=True, slots=True)
class Unreached:
    """A trainable parameter that the forward uses but that gets no gradient.

    Attributes:
        weight: its name.
        module, source: where it is used first.
        function: the `torch.autograd.Function` whose forward uses it; "" outside of any.
        behind: modules that had returned before it with gradients on, in order.
        ignored: whether it is used with gradients on, but the loss does not depend on the result.
    """

    weight: str
    module: str
    source: str
    function: str
    behind: tuple[str, ...]
    ignored: bool = False


@dataclass(frozen=True)
class Reach:
    """Reach measured on one batch.

    Attributes:
        copy: the copy of the model that was measured, in words.
        rows, tokens: of the batch as it was measured.
        labels: the learned labels; None if the model returns no logits.
        leaks: predictions that depend on inputs that they must not depend on.
        unused: inputs and parameters that change no prediction.
        undecided: unmeasured dependences, with the reason, a clause each.
        matrix: the tokens that reach some predictions of one row; None if that was not measured.
        skipped: modules with weights that some batches of the processes run and others do not.
        parting: the first collectives of FSDP that the processes' batches disagree on; None if all agree, if
            there is one batch, or in a process that has a process group.
        ungraded: trainable parameters to which the loss of some batch gives no gradient.
    """

    copy: str
    rows: int
    tokens: int
    labels: Labels | None = None
    leaks: tuple[Leak, ...] = ()
    unused: tuple[NoReach, ...] = ()
    undecided: tuple[str, ...] = ()
    matrix: Matrix | None = None
    skipped: tuple[str, ...] = ()
    parting: Parting | None = None
    ungraded: tuple[str, ...] = ()

    def leak(self, *sources: Source) -> Leak | None:
        """Return the first leak from one of `sources`."""
        return next((leak for leak in self.leaks if leak.source in sources), None)
