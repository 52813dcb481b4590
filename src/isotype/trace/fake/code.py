"""What a step runs: the model, its inputs or loss, the optimizer, generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from isotype.model.loss import loss_of
from isotype.records.memory import MemoryKind
from isotype.records.request import LossOf, named_inputs
from isotype.records.trace import Weight
from isotype.trace.fake.untouched import Untouched, beside_twin

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


def loss_function(inputs: Any) -> LossFunction:
    """(model, inputs) -> loss, of what a step is fed."""
    if isinstance(inputs, LossOf):
        return inputs.function
    if callable(inputs):
        return lambda model, _: cast("torch.Tensor", inputs(model))
    return lambda model, inputs: loss_of(model(**inputs))


@dataclass(frozen=True, eq=False)
class StepCode:
    """Whose code runs in a step.

    Attributes:
        model: any module, real or on the meta device; it is not touched.
        inputs: the keyword arguments the model is called with, a callable model -> loss, or a `LossOf`.
        optimizer: an optimizer, its class or a callable (parameters -> optimizer); None for the set-up's.
        generate: what the phase `generate` runs; None for one forward without labels and without gradients.
        folded: trace equal layers once, see `isotype.model.fold`.
        weights: `weights_of(model)`, where it is known: to look at every value takes a while.
        evaluation: inputs that the phase `evaluate` runs on, as `inputs`; None where nothing is evaluated.
        reference: whether a frozen copy of the model's weights lies in memory.
    """

    model: nn.Module
    inputs: Any
    optimizer: Any = None
    generate: Callable[[nn.Module], Any] | None = None
    folded: bool = False
    weights: Sequence[Weight] | None = None
    evaluation: Any = None
    reference: MemoryKind | None = None

    @property
    def named_inputs(self) -> Mapping[str, Any]:
        """The inputs that are faked with the model, by name; none where a callable brings its own."""
        return named_inputs(self.inputs)

    @property
    def loss(self) -> Any:
        """What computes the loss; the inputs themselves where that is the model."""
        return self.inputs.function if isinstance(self.inputs, LossOf) else self.inputs

    @property
    def loss_function(self) -> LossFunction:
        """(model, inputs) -> loss."""
        return loss_function(self.inputs)

    def reached(self) -> Untouched:
        """What this code reaches beside the twin, saved."""
        return Untouched(
            [
                ("the loss", self.loss),
                ("the inputs", self.inputs.inputs if isinstance(self.inputs, LossOf) else None),
                ("generate", self.generate),
                ("the evaluation", self.evaluation),
                ("the optimizer", self.optimizer),
                *beside_twin(self.model),
            ]
        )
