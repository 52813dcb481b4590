"""Frozen data about the first non-finite value of a step: operator, operands and cause."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from isotype.records.memory import Phase

Cause = Literal[
    "weight",  # a parameter, a buffer or a quantization state has the value; `culprit` names the tensor
    "input",  # the batch has the value; `culprit` names the argument
    "outside",  # a tensor that no traced operator wrote: a custom kernel or code outside of the step
    "range",  # the exact result is finite but exceeds the range of the result's dtype
    "inside",  # the exact result fits its dtype, but an intermediate value of the operator does not
    "row",  # softmax of a row in which every entry is -inf
    "labels",  # a mean over labels that are all masked
    "empty",  # a mean or a standard deviation of no values
    "domain",  # 0 / 0, log(0), sqrt(-1): no number in any dtype; `entries` are the operands' values
    "constant",  # the code wrote the value, which reached the loss
    "unknown",
]


@dataclass(frozen=True, slots=True)
class Value:
    """A float operand of the operator, or its result.

    Attributes:
        role: name of the operator's argument, or `"result"`.
        largest: largest magnitude of the finite elements; 0 if there are none.
        name: name of the weight, buffer or input; "" for a computed value.
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
        return not (self.nan or self.infinite)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first operator that got only finite operands, or operands from outside of the step, and returned NaN or infinity.

    Attributes:
        op: name of the operator, such as `aten.mm.default`.
        module: fully qualified name of the innermost module that called the operator ("" is the model itself or the loss). A
            backward operator has the module of its forward operator.
        phase: `forward`, `backward`, or `unscale`, which computes the gradient norm.
        source: `file:line` of the call; "" if unknown.
        operands: float operands before the operator ran.
        culprit: the operand that was not finite before the operator ran; None if all operands were finite.
        exact: largest magnitude of the result in a wider dtype (float32 for 16 bits, else float64). None if that result is also
            not finite, or if the operator does not support the wider dtype.
        entries: operand values of an element-wise operator at the first non-finite element; empty for other operators.
        rows: indices of the batch's rows that have a non-finite result; empty if the result has no such rows.
        batch: number of rows in the batch; 0 if unknown.
        scale: loss scale of the backward; None if there is none.
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
