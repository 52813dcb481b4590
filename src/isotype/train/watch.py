"""What the current optimizer step of a trainer was given, so that a step whose loss is no number can be run again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from isotype.compat.transformers import GRADIENT_NORM, PREPARE_INPUTS
from isotype.core.errors import first_line
from isotype.core.random_states import RandomStates
from isotype.ranges.verdict import Verdict
from isotype.records.nonfinite import NonFinite
from isotype.trace.nonfinite.again import first_nonfinite


@dataclass(frozen=True, slots=True)
class Again:
    """What came of running a step again.

    Attributes:
        finding: the first value that is no number; None where every value was one.
        why_not: why the step could not be run again, "" where it could.
    """

    finding: NonFinite | None = None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """What one call of `compute_loss` was given: references, no copies of tensors."""

    model: Any
    inputs: Any
    items: Any
    states: RandomStates


MicroBatches = tuple[_MicroBatch, ...]
"""What a step was given."""


@dataclass
class StepWatch:
    """Sits on a trainer from `attach` to `detach` and keeps the micro-batches of the current optimizer step.

    Callbacks are given neither the batch nor the loss; two methods of the trainer's instance see both. They are
    replaced on the instance alone, and `detach` takes the replacements away.

    Args:
        trainer: a transformers or TRL trainer.
        verdict: judges its steps.
    """

    trainer: Any
    _batches: list[_MicroBatch] = field(default_factory=list)
    _losses: list[torch.Tensor] = field(default_factory=list)
    _norm: torch.Tensor | float | None = None
    verdict: Verdict = field(default_factory=Verdict)
    _replaced: tuple[str, ...] = ()

    def attach(self) -> None:
        """Begin to keep."""
        self._replace("compute_loss", self._around_loss)
        self._replace(GRADIENT_NORM, self._around_norm)

    def detach(self) -> None:
        """Leave the trainer as it was, and let go of the batches."""
        for name in self._replaced:
            vars(self.trainer).pop(name, None)
        self._replaced = ()
        self.begin_step()

    def begin_step(self) -> None:
        """Another optimizer step begins."""
        self._batches.clear()
        self._losses.clear()
        self._norm = None

    def step_so_far(self) -> tuple[float, float | None]:
        """(sum of the losses, norm of the gradients) of the step; the one time that it is waited for.

        The norm is that of all processes. Where there are several their losses are brought together only when the norm
        is not finite, so that all of them judge alike, and wait for each other in no other step.
        """
        parts = [*self._losses, *([] if self._norm is None else [self._norm])]
        if not parts:
            return 0.0, None
        device = self._losses[0].device if self._losses else torch.device("cpu")
        values = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=device) for v in parts]).tolist()
        norm = None if self._norm is None else values.pop()
        accelerator, loss = self.trainer.accelerator, sum(values)
        if accelerator.num_processes == 1:
            return loss, norm
        if norm is None or math.isfinite(norm):
            return 0.0, norm
        return float(accelerator.reduce(torch.tensor(loss, device=device), reduction="mean")), norm

    def batches(self) -> MicroBatches:
        """What the current step was given so far, for `again`, once the next one has begun."""
        return tuple(self._batches)

    def again(self, scale: float | None, batches: MicroBatches | None = None) -> Again:
        """Run the step again, every micro-batch with the random states that it had, and name the first bad operator.

        Args:
            scale: the loss scale of the step's backward, None without one.
            batches: of the step; those of the current one by default.
        """
        batches, trainer = self.batches() if batches is None else batches, self.trainer
        if not batches:
            return Again(why_not="its batch was not seen")
        if str(getattr(trainer.accelerator, "distributed_type", "")).endswith("DEEPSPEED"):
            return Again(why_not="DeepSpeed runs the backward by itself")
        self.detach()
        before = dict(vars(trainer))
        setattr(
            trainer, PREPARE_INPUTS, _as_it_is
        )  # what a batch was made into; completions are not generated again

        def step() -> Iterator[torch.Tensor]:
            for batch in batches:
                batch.states.put_back()
                yield trainer.training_step(batch.model, copy.copy(batch.inputs), batch.items)

        named = [dict(batch.inputs) for batch in batches]
        alone = trainer.accelerator.num_processes == 1
        try:
            return Again(first_nonfinite(trainer.model, step, named, scale, stop=alone))
        except Exception as error:  # noqa: BLE001 - what stopped the run is told in any case, and this beside it
            return Again(why_not=f"{type(error).__name__}: {first_line(error)}")
        finally:
            vars(trainer).clear()
            vars(trainer).update(before)

    # --------------------------------------------------------------------------------------------------- the trainer

    def _replace(self, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if name not in vars(self.trainer):
            method = getattr(self.trainer, name)
            setattr(self.trainer, name, wraps(method)(around(method)))
            self._replaced += (name,)

    def _around_loss(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not model.training:
                return method(model, inputs, *args, **kwargs)
            states = RandomStates.taken(self.trainer.args.device)
            items = kwargs.get("num_items_in_batch")
            self._batches.append(_MicroBatch(model, copy.copy(inputs), items, states))
            result = method(model, inputs, *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            self._losses.append(loss.detach().mean())
            return result

        return compute_loss

    def _around_norm(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def get_grad_norm(*args: Any, **kwargs: Any) -> Any:
            self._norm = method(*args, **kwargs)
            return self._norm

        return get_grad_norm


def _as_it_is(inputs: Any) -> Any:
    return inputs
