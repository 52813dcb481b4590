"""The call of an operator that is running in a step, and the place of the call."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from isotype.core.dtypes import FLOATS
from isotype.core.operators import operator_name, schema_of, tensors_in
from isotype.records.trace import Breach


@dataclass(slots=True)
class CallPlace:
    """The place of an operator: module and source line. The operator stands for `repeats` equal operators."""

    module: str
    source: Any
    repeats: int
    breached: bool = False
    backward: dict[Any, CallPlace] = field(default_factory=dict)

    def written_at(self, source: Any) -> CallPlace:
        """Return the place for an operator at the line `source` in the backward of a `torch.autograd.Function`."""
        if source is None:
            return self  # torch's own code runs the operator (gradient checkpointing)
        return self.backward.setdefault(source, CallPlace(self.module, source, self.repeats))


class OperatorCall:
    """A call of an operator.

    Attributes:
        func, args, kwargs: the operator and its arguments.
        name: name of the operator, such as `aten.mm.default`.
        tensors: (argument name, tensor) of each tensor argument.
        place: the place of the call.
        breach: the contract that the call has broken; None if there is none.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, place: CallPlace) -> None:
        self.func, self.args, self.kwargs, self.place = func, args, kwargs, place
        self.name, self.tensors = operator_name(func), tensors_in(func, args, kwargs)
        self.breach: Breach | None = None

    def but(self, args: Any, kwargs: Any) -> OperatorCall:
        """Return a call of the same operator with other arguments."""
        return OperatorCall(self.func, args, kwargs, self.place)

    @cached_property
    def floats(self) -> list[torch.Tensor]:
        """The float operands."""
        return [tensor for _, tensor in self.tensors if tensor.dtype in FLOATS]

    @property
    def written(self) -> list[torch.Tensor]:
        """The operands into which the operator writes."""
        written = schema_of(self.func).written
        operands = self.tensors if written else ()
        return [tensor for role, tensor in operands if role.partition("[")[0] in written]
