"""Frozen data about a step that says which inputs and weights change which predictions and gradients."""

from dataclasses import dataclass
from typing import Literal

from isotype.core.names import plural

Source = Literal[
    "packed row",  # the tokens of a sequence that is packed into the same row
    "other row",  # the tokens of another row of the batch
    "padding",  # the tokens that the attention mask leaves out
    "padding position",  # the number of padding tokens before a row
    "later token",  # a token after the predicted one
    "own label",  # the label of the prediction, as an input of the model
]
"""Kinds of inputs on which a prediction must not depend."""

Unused = Literal["input", "picture", "adapter", "weight", "ungraded", "count"]
"""Kinds of inputs and parameters that should change predictions but do not. Parameters of the kind `ungraded` get no gradient."""


@dataclass(frozen=True)
class Leak:
    """Predictions that change with inputs on which they must not depend.

    Attributes:
        source: the changed input.
        row, column: place of the first changed prediction.
        of: number of compared predictions.
        largest: the largest change of a logit, relative to the largest logit.
        module, kind: name and class of the first module with unchanged inputs but changed outputs; "" if there is none.
        without: an input of the model; without this input, the leak disappears. "" if there is none.
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

    @property
    def where(self) -> str:
        """Class name of the module that causes the leak."""
        return self.kind or "the model"


@dataclass(frozen=True)
class NoReach:
    """An input or parameters that change no prediction.

    Attributes:
        name: name of the input or of the parameters (with `*` for layer numbers).
        why: the reason; "" if unknown.
    """

    kind: Unused
    name: str
    why: str = ""


@dataclass(frozen=True)
class Labels:
    """The labels in the loss.

    Attributes:
        learned: number of predictions on which the loss depends.
        shift: number of tokens from a prediction to its label (1 in a causal model); None if labels do not repeat the inputs.
        at_padding: number of labels at tokens that the attention mask hides.
        at_pictures: number of labels of image tokens.
    """

    learned: int
    shift: int | None = None
    at_padding: int = 0
    at_pictures: int = 0


@dataclass(frozen=True)
class Matrix:
    """The tokens that each prediction in one row of the batch depends on.

    Attributes:
        row: index of the row in the batch.
        sequences: index of each token's sequence; -1 for padding.
        reached: (column of a prediction, columns of the tokens that change it).
    """

    row: int
    sequences: tuple[int, ...]
    reached: tuple[tuple[int, tuple[int, ...]], ...]

    def allowed(self, column: int, token: int) -> bool:
        """Return True if a causal model's prediction at `column` may depend on the token."""
        return token <= column and self.sequences[token] == self.sequences[column]


@dataclass(frozen=True)
class Collective:
    """A communication call in which all processes of a sharded training take part.

    Attributes:
        move: `gathers` if the call gathers weights, and `reduces` if it reduces gradients.
        module: the sharded module that has the weights; "" in the backward.
        elements: number of elements of the whole tensor.
    """

    move: str
    module: str
    elements: int

    @property
    def signature(self) -> tuple[str, int]:
        """Kind and size of the communication. They must be equal in all processes."""
        return self.move, self.elements

    def __str__(self) -> str:
        return f"{self.move} {self.elements:,} numbers{f' of {self.module}' if self.module else ''}"


@dataclass(frozen=True)
class CollectiveMismatch:
    """The first place in a step where two processes call different collectives.

    Attributes:
        process: index of the process (and of its batch) whose calls differ from those of the first process.
        at: index of the collective in the step.
        first, other: the collectives of the two processes; None if a process calls no further collective.
    """

    process: int
    at: int
    first: Collective | None
    other: Collective | None


@dataclass(frozen=True, slots=True)
class Unreached:
    """A trainable parameter that the forward uses, but that gets no gradient.

    Attributes:
        weight: name of the parameter.
        module, source: place of the parameter's first use.
        function: the `torch.autograd.Function` whose forward uses the parameter; "" if there is none.
        behind: modules that ran with gradients enabled before the first use of the parameter, in order.
        ignored: True if the parameter was used with gradients enabled, but the loss does not depend on the result.
        cut: `file:line` that drops the graph of a result (`detach()`, `.data`, `item()`); "" if there is none.
        cleared: True if code removed the computed gradient before the optimizer's step.
        frozen: `file:line` that freezes the parameter between its forward and the backward; "" if there is none.
    """

    weight: str
    module: str
    source: str = ""
    function: str = ""
    behind: tuple[str, ...] = ()
    ignored: bool = False
    cut: str = ""
    cleared: bool = False
    frozen: str = ""


@dataclass(frozen=True)
class Reach:
    """The inputs and weights on which predictions and gradients depend, measured on one batch.

    Attributes:
        copy: a description of the measured copy of the model.
        rows, tokens: shape of the measured batch.
        labels: the labels in the loss; None if the model returns no logits.
        leaks: predictions that change with inputs that they must not depend on.
        unused: inputs and parameters that change no prediction.
        undecided: reasons why dependences were not measured.
        matrix: the tokens that some predictions of one row depend on; None if not measured.
        skipped: modules with weights that run for the batches of some processes, but not of all processes.
        mismatch: the first place where processes call different collectives of FSDP; None if there is none or it was not
            measured.
        ungraded: trainable parameters that get no gradient from the loss of at least one batch.
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
    mismatch: CollectiveMismatch | None = None
    ungraded: tuple[str, ...] = ()

    def leak(self, source: Source) -> Leak | None:
        return next((leak for leak in self.leaks if leak.source == source), None)

    @property
    def measured(self) -> str:
        """A description of the measurement: its precision, the copy of the model, and the size of the batch."""
        return f"measured in float64 on {self.copy}, with {plural(self.rows, 'row')} of {plural(self.tokens, 'token')}"
