"""The first value of a step that is no number, as data: where it was made, of what, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from isotype.records.memory import Phase

Cause = Literal[
    "weight",  # a parameter, a buffer or a quantization state holds it; `culprit` names it
    "input",  # the batch holds it; `culprit` names the argument
    "outside",  # a tensor that no operator of the step has made, or that a kernel of its own has written
    "range",  # the exact result is a number, and the dtype of the result ends before it
    "inside",  # the exact result fits the dtype of the result: what the operator computes on its way does not
    "row",  # softmax of a row in which every entry is -inf
    "labels",  # a mean over labels of which none counts
    "empty",  # a mean or a spread of nothing
    "domain",  # 0 / 0, log(0), sqrt(-1): no number in any dtype; `entries` are the operands' values
    "constant",  # the code itself wrote it, and it reached the loss
    "unknown",
]


@dataclass(frozen=True, slots=True)
class Value:
    """A float tensor of the operator.

    Attributes:
        role: the operator's own name of the argument; `"result"`.
        dtype: its dtype.
        shape: its shape.
        largest: largest magnitude of its finite elements, 0 where there are none.
        nan: elements that are NaN.
        infinite: elements that are infinite.
        name: of the weight, buffer or input that it is, "" for what the step computed.
    """

    role: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    largest: float
    nan: int
    infinite: int
    name: str = ""

    @property
    def finite(self) -> bool:
        """Whether all elements are numbers."""
        return not (self.nan or self.infinite)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first operator of a step whose result is not finite though its operands are, or that meets one that is not.

    Attributes:
        op: `aten.mm.default`.
        module: fully qualified name of the innermost module it runs in; in the backward, the module of the forward
            call; "" is the model itself or the loss.
        phase: forward, backward, or unscale for the norm of the gradients.
        source: `file:line` that called it, "" where there is none.
        operands: its float operands, before it ran.
        result: its result.
        cause: why.
        culprit: the operand that was not finite already; None where all were.
        exact: largest magnitude of the result in the next wider dtype (float32 for 16 bits, else float64); None where
            it is not finite there either, or where the operator does not run in it.
        entries: the operands' values at the first element that is no number, where the operator works by elements;
            for cause `"row"` empty.
        rows: rows of the batch that hold such elements, as far as the result has rows of the batch.
        batch: rows of the batch, 0 where that is not known.
        scale: the loss scale of the backward, None without one.
    """

    op: str
    module: str
    phase: Phase
    source: str
    operands: tuple[Value, ...]
    result: Value
    cause: Cause
    culprit: Value | None = None
    exact: float | None = None
    entries: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()
    batch: int = 0
    scale: float | None = None
