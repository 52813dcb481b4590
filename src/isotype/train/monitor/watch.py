"""What the current optimizer step of a trainer was given, so that a step whose loss is no number can be run again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from isotype.compat.replaced import Replacements
from isotype.compat.transformers import batches_as_they_are, steps_seen
from isotype.core.errors import first_line
from isotype.core.random_states import RandomStates
from isotype.ranges.verdict import Verdict
from isotype.records.nonfinite import NonFinite
from isotype.trace.nonfinite.again import first_nonfinite
from isotype.train.monitor.step_values import StepValues


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
class StepBatches:
    """Keeps the micro-batches of a trainer's current optimizer step, from `attach` to `detach`: callbacks are not given them.

    Args:
        trainer: a transformers or TRL trainer.
    """

    trainer: Any
    _verdict: Verdict = field(default_factory=Verdict)
    _batches: list[_MicroBatch] = field(default_factory=list)
    _methods: Replacements | None = None

    def attach(self) -> None:
        """Begin to keep."""
        self._methods = steps_seen(self.trainer, self._around_loss)

    def detach(self) -> None:
        """Leave the trainer as it was, and let go of the batches."""
        if self._methods is not None:
            self._methods.put_back()
        self._methods = None
        self.begin_step()

    def begin_step(self) -> None:
        """Another optimizer step begins."""
        self._batches.clear()

    def ends(self, values: StepValues) -> str | None:
        """What of a step ends the training, see `Verdict`; None while it may go on."""
        scale = values.scale
        return self._verdict.of(values.loss, values.grad_norm, None if scale is None else lambda: scale)

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

        def step() -> Iterator[torch.Tensor]:
            for batch in batches:
                batch.states.put_back()
                yield trainer.training_step(batch.model, copy.copy(batch.inputs), batch.items)

        named = [dict(batch.inputs) for batch in batches]
        alone = trainer.accelerator.num_processes == 1
        try:
            with batches_as_they_are(trainer):
                return Again(first_nonfinite(trainer.model, step, named, scale, stop=alone))
        except Exception as error:  # noqa: BLE001 - what stopped the run is told in any case, and this beside it
            return Again(why_not=f"{type(error).__name__}: {first_line(error)}")

    def _around_loss(
        self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if model.training:
            states = RandomStates.taken(self.trainer.args.device)
            items = kwargs.get("num_items_in_batch")
            self._batches.append(_MicroBatch(model, copy.copy(inputs), items, states))
        return method(model, inputs, *args, **kwargs)


@dataclass
class StepWatch(StepBatches):
    """Of a trainer that does not measure its steps itself: their losses and the norms of their gradients, too."""

    _losses: list[torch.Tensor] = field(default_factory=list)
    _norm: torch.Tensor | float | None = None

    def attach(self) -> None:
        """Begin to keep and to measure."""
        self._methods = steps_seen(self.trainer, self._around_loss, self._around_norm)

    def begin_step(self) -> None:
        """Another optimizer step begins."""
        super().begin_step()
        self._losses.clear()
        self._norm = None

    def step_so_far(self, scale: float | None) -> StepValues:
        """Sum of the losses and norm of the gradients of the step, without tokens; the one time that it is waited for.

        The norm is that of all processes. Where there are several their losses are brought together only when the norm
        is not finite, so that all of them judge alike, and wait for each other in no other step.

        Args:
            scale: the loss scale of its backward, None without one.
        """
        parts = [*self._losses, *([] if self._norm is None else [self._norm])]
        if not parts:
            return StepValues(0, 0.0, None, scale)
        device = self._losses[0].device if self._losses else torch.device("cpu")
        values = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=device) for v in parts]).tolist()
        norm = None if self._norm is None else values.pop()
        accelerator, loss = self.trainer.accelerator, sum(values)
        if accelerator.num_processes > 1:
            judged = norm is not None and not math.isfinite(norm)
            whole = torch.tensor(loss, device=device)
            loss = float(accelerator.reduce(whole, reduction="mean")) if judged else 0.0
        return StepValues(0, loss, norm, scale)

    def _around_loss(
        self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = super()._around_loss(method, model, inputs, *args, **kwargs)
        if model.training:
            loss = result[0] if isinstance(result, tuple) else result
            self._losses.append(loss.detach().mean())
        return result

    def _around_norm(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._norm = method(*args, **kwargs)
        return self._norm
