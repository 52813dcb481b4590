"""What a step runs: the model, its inputs or loss, the optimizer, generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from isotype.compat.bitsandbytes import nothing_repacked
from isotype.compat.compiler import uncompiled
from isotype.compat.torch import fake_errors_unlogged
from isotype.compat.transformers import fakes_taken_for_real
from isotype.core.random_states import random_states_kept
from isotype.model.loss import loss_of
from isotype.records.memory import MemoryKind
from isotype.records.request import LossOf, named_inputs
from isotype.records.trace import Weight
from isotype.trace.fake.untouched import Untouched, beside_twin

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


def loss_function(inputs: Any) -> LossFunction:
    """Return (model, inputs) -> loss, of what a step is fed."""
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
        evaluation: inputs that the phase `evaluate` runs on, as `inputs`; None if nothing is evaluated.
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
        """The inputs that are faked with the model, by name; none if a callable brings its own."""
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


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Within it random states as they were, nothing compiled, no gradient mode or autocast left over from outside."""
    with (
        fake_errors_unlogged(),
        random_states_kept(),
        torch.enable_grad(),
        _no_autocast(),
        uncompiled(),
        fakes_taken_for_real(),
        nothing_repacked(),
        torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Autocast off and outermost: within another one, what is left does not forget the casts it has kept.

    The real step's autocast ends with the forward, and casts of weights that it kept end with it: in the backward a
    recomputation makes them again, in the dtype that it then runs in, and they take no memory there.
    """
    before, depth = torch.is_autocast_enabled("cpu"), torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()
