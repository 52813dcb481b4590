"""Measures and checks the optimizer steps of a trainer, and runs a step again if a value is not finite."""

from __future__ import annotations

import copy
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import get_last_checkpoint

from isotype.compat.replaced import Replacements
from isotype.compat.torch import loss_scale
from isotype.compat.transformers import batches_as_they_are, steps_seen
from isotype.core.errors import Problem, TrainingError, error_line
from isotype.core.random_states import RandomStates
from isotype.data.pictures import picture_columns
from isotype.records.nonfinite import NonFinite
from isotype.report.nonfinite import problem_of
from isotype.report.text import chat_command
from isotype.trace.nonfinite.again import StopReason, first_nonfinite
from isotype.train.monitor.memory import MemoryMeter
from isotype.train.monitor.step import MicroBatch, Step

Replay = NonFinite | str
"""Result of a repeated step: the first value that is not finite, the reason if unknown, or "" if all are finite."""


@dataclass
class StepMeter:
    """Measures a trainer's steps. `attach` replaces trainer methods, because callbacks get no batch and no loss.

    Args:
        together: True if all processes combine their values in every step (a collective operation). If False (in a script),
            tokens are not counted, and processes combine losses only if the gradient norm is not finite. This norm is
            equal in all processes, so that all processes combine their losses in the same step.
        signals: the stop signals (SIGINT, SIGTERM) that this process has received so far.

    Attributes:
        now: the current or last step.
    """

    trainer: Any
    together: bool = False
    memory: MemoryMeter | None = None
    signals: Sequence[int] = ()
    now: Step = field(default_factory=lambda: Step(0))
    _stop_reason: StopReason = field(default_factory=StopReason)
    _methods: Replacements = field(default_factory=Replacements)

    def attach(self) -> None:
        self._methods = steps_seen(self.trainer, self._around_step, self._around_loss, self._around_norm)

    def detach(self) -> None:
        self._methods.close()

    def begin(self, number: int, learning_rate: float = 0.0) -> None:
        self.now = Step(number, learning_rate)
        if self.memory is not None:
            self.memory.restart()

    def end(self) -> Step:
        step = self.now
        step.seconds = time.perf_counter() - step.began
        step.memory_bytes = 0 if self.memory is None else self.memory.peak()
        step.skipped = bool(self.trainer.accelerator.optimizer_step_was_skipped)
        return step

    def launch(self) -> Step:
        """After the backward of a step, collect the step's values on the device, without waiting for the device."""
        accelerator = self.trainer.accelerator
        self.now.scale = loss_scale(getattr(accelerator, "scaler", None))
        self.now.launch(self.trainer.args.device, accelerator if self.together else None, bool(self.signals))
        return self.now

    def read(self) -> Step:
        """Return the step with its values as numbers. Only this method makes the host wait for the device, once per step."""
        step, accelerator = self.now, self.trainer.accelerator
        if step.is_read:
            return step
        self.launch().read()
        if not self.together and accelerator.num_processes > 1:
            broken = step.grad_norm is not None and not math.isfinite(step.grad_norm)
            loss = torch.tensor(step.loss, device=self.trainer.args.device)
            step.loss = float(accelerator.reduce(loss, reduction="mean")) if broken else 0.0
        return step

    def ends(self, step: Step) -> str | None:
        """Return the reason why a step ends the training (see `StopReason`), or None if the training continues."""
        scale = None if step.scale is None else lambda: step.scale
        return self._stop_reason.of(step.loss, step.grad_norm, scale)

    def replay(self, step: Step) -> Replay:
        """Run a step again with the random states of each micro-batch. Return the first result that is not finite."""
        trainer = self.trainer
        if not step.batches:
            return "no batch of the step was recorded"
        if str(getattr(trainer.accelerator, "distributed_type", "")).endswith("DEEPSPEED"):
            return "DeepSpeed runs the backward in its engine, not in the trainer"
        self.detach()

        def losses() -> Iterator[torch.Tensor]:
            for batch in step.batches:
                batch.states.put_back()
                yield trainer.training_step(batch.model, copy.copy(batch.inputs), batch.items)

        named = [dict(batch.inputs) for batch in step.batches]
        alone = trainer.accelerator.num_processes == 1
        try:
            with batches_as_they_are(trainer):
                return first_nonfinite(trainer.model, losses, named, step.scale, stop=alone) or ""
        except Exception as error:  # noqa: BLE001 - reported beside the error that ends the run
            return error_line(error)

    def stopped(self, what: str, step: Step) -> TrainingError:
        """Return the error that ends a run before the update of `step`. `what` is the reason ("the loss is not finite")."""
        parts = {
            "loss": step.loss,
            "learning rate": step.learning_rate,
            "gradient norm": step.grad_norm,
            "loss scale": step.scale,
        }
        measured = ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)
        headline, script = f"{what}: stopped before the update", not self.together
        return not_finite(self.trainer, headline, step.number, measured, self.replay(step), script=script)

    def _around_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = method(*args, **kwargs)
        self.now.loss = self.now.loss + loss.detach()
        return loss

    def _around_loss(
        self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if model.training:
            states = RandomStates.taken(self.trainer.args.device)
            items = kwargs.get("num_items_in_batch")
            self.now.batches.append(MicroBatch(model, copy.copy(inputs), items, states))
        return method(model, inputs, *args, **kwargs)

    def _around_norm(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The Trainer calls this once per step, with unscaled gradients, for the norm before clipping.
        self.now.grad_norm = method(*args, **kwargs)
        return self.now.grad_norm


_OF_THE_DATA = ("input", "labels", "row", "empty", "constant", "outside")


def not_finite(
    trainer: Any,
    headline: str,
    step: int,
    measured: str = "",
    replay: Replay | None = None,
    *,
    script: bool = False,
) -> TrainingError:
    """Return the error that ends a run whose loss, gradients or weights are not finite.

    Args:
        replay: result of running the step again, or None if the step was not run again.
        script: True in a user's script. The error then shows arguments as Python code.
    """
    what = f"step {step}{': ' if measured else ''}{measured}"
    first = replay if isinstance(replay, NonFinite) else None
    if isinstance(replay, str):
        why = replay and f"could not be run again ({replay})"
        what += f"\n    this step {why or 'was run again, and all of its values were finite'}"
    of_data = first is not None and (first.cause in _OF_THE_DATA or first.entries == (0.0, 0.0))
    tries = [] if of_data else _tries(trainer.args, step, script)
    problems = [Problem(what, "finite numbers", "; or ".join(tries) or "see the operator below")]
    if first is not None:
        problems.append(problem_of(first))
    return TrainingError(headline, problems, _hint_of_script(trainer.args) if script else _hint(trainer))


def _hint(trainer: Any) -> str:
    checkpoint = trainer.last_checkpoint()
    if checkpoint is None:
        return "no checkpoint has been saved yet; --save_steps N saves one every N steps"
    command = shlex.join(chat_command(checkpoint, pictures=bool(picture_columns(trainer.train_dataset))))
    return f"{checkpoint} is a complete checkpoint; to use it: {command}"


def _hint_of_script(arguments: Any) -> str:
    last = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
    if last is None:
        return "no checkpoint has been saved yet; save_steps=N saves one every N steps"
    return f"{last} is a complete checkpoint; resume with trainer.train(resume_from_checkpoint={last!r})"


def _tries(arguments: Any, step: int, script: bool) -> list[str]:
    def flag(name: str, value: str) -> str:
        return f"{name}={value}" if script else f"--{name} {value}"

    tries = []
    if arguments.fp16:
        wider = "bf16=True, or neither bf16 nor fp16" if script else "--dtype bfloat16 or float32"
        tries.append(f"{wider}: float16's largest number is 65504")
    if step > 1:
        tries.append(flag("learning_rate", f"{arguments.learning_rate / 10:g}"))
        if not arguments.warmup_steps:
            tries.append(f"{flag('warmup_steps', '0.05')} (a share of all steps)")
        if arguments.max_grad_norm <= 0:
            tries.append(flag("max_grad_norm", "1"))
    elif not arguments.fp16:
        tries.append("check the first rows (a row without labels has no loss), and the model's config")
    return tries
