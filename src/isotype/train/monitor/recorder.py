"""Collect what a run does while it does it: one record a step, for the run report and the progress bar."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback

from isotype.core.errors import SaveError, first_line
from isotype.report.run.headroom import Headroom
from isotype.report.run.record import EvalRecord, RunRecord, StepRecord
from isotype.train.monitor.diverged import stopped
from isotype.train.monitor.memory import HeadroomMeter
from isotype.train.monitor.progress import ProgressView
from isotype.train.monitor.step import Step, skipping_optimizer

_LOGGED_ANYWAY = frozenset(
    {"loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "total_flos"}
)

_SEEN = ("should_log", "should_evaluate", "should_save", "should_training_stop", "should_epoch_stop")
"""What a trainer's control says where something is about to be done with the step that has ended."""


class RunRecorder(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Makes a `StepRecord` of every optimizer step of a `PolicyTrainer`.

    Of several processes each holds the records, so that all judge the run alike; only the first shows progress. Where the device leaves out an
    update by itself (`isotype.train.monitor.step`), a step is judged and recorded while the next one runs, or before anything is saved,
    logged or measured of it.

    Args:
        trainer: the PolicyTrainer.
        view: shows the run: `update` with (steps done, steps in all, record of the last one), once with None before the first step, then
            after every step; `evaluated` with every held-back loss; `logged` with a step that the trainer has logged metrics of its own after.
        earlier: the report of the run up to the checkpoint that it goes on from.

    Attributes:
        steps: the records so far; those of `earlier` come first.
        evals: held-back losses so far, likewise.
        resumed_from: the step that the run went on from, None for a start from the beginning.
    """

    def __init__(
        self,
        trainer: Any,
        view: ProgressView | None = None,
        earlier: RunRecord | None = None,
    ) -> None:
        self.trainer, self.view = trainer, view
        self.steps: list[StepRecord] = [] if earlier is None else list(earlier.steps)
        self.evals: list[EvalRecord] = [] if earlier is None else list(earlier.evals)
        self._earlier = earlier
        self._steps_before = len(self.steps)
        self.resumed_from: int | None = None
        self._headroom: HeadroomMeter | None = None
        self._skipping: Any = None  # the optimizer that leaves an update out by itself, in this step
        self._unread: Step | None = None  # has ended, and its values are on their way

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the run starts; the checkpoint may have been rotated away by the end."""
        self.resumed_from = state.global_step or None
        if getattr(args, "fp16", False):
            self._headroom = HeadroomMeter(self.trainer.model, state.max_steps)
        self._show(state, None)

    def headroom(self) -> Headroom | None:
        """How much of float16's range the blocks used so far; None of a run in another dtype."""
        measured = None if self._headroom is None else self._headroom.record()
        before = None if self._earlier is None else self._earlier.headroom
        if measured is None or before is None or measured.blocks != before.blocks:
            return measured or before
        return replace(measured, samples=(*before.samples, *measured.samples))

    @property
    def made_steps(self) -> bool:
        """Whether this command has made a step, beyond those of `earlier`."""
        return len(self.steps) > self._steps_before

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the last step."""
        self.settle()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock; the learning rate is the one this step will be taken with."""
        number = state.global_step + 1
        if self._headroom is not None:
            self._headroom.begin_step(number)
        self.trainer.steps.begin(number, float(kwargs["lr_scheduler"].get_last_lr()[0]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run before an update that would ruin the weights, and say which operator is to blame.

        Raises:
            TrainingError: loss or gradient are not finite, see `Verdict`.
        """
        self.settle()
        self._skipping = skipping_optimizer(kwargs["optimizer"], self.trainer.accelerator, args.device)
        if self._skipping is None:
            self._judge(self.trainer.steps.read())
            return
        step = self.trainer.steps.launch()
        self._skipping.found_inf = step.broken()
        step.send()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take back what told the optimizer whether to leave the update out."""
        if self._skipping is not None:
            del self._skipping.found_inf
            self._skipping = None

    def settle(self) -> None:
        """Read the step that the host has not looked at yet, record it and end the run where it has to.

        Raises:
            TrainingError: its loss or gradient was not finite; its update was left out.
        """
        step, self._unread = self._unread, None
        if step is not None:
            step.read()
            self._judge(step)
            self._keep(step)

    def record_unread(self) -> str:
        """When an exception has ended the run: record the step that the host has not looked at yet, without judging it.

        Returns:
            why it is not in the report, as a sentence; empty where it is, or where there was none.
        """
        step, self._unread = self._unread, None
        if step is None:
            return ""
        try:
            step.read()
        except RuntimeError as error:  # what has failed may be the device
            reason = first_line(error)
            return (
                f"step {step.number} is not in the report: its loss cannot be read from the device ({reason})"
            )
        self.steps.append(step.record())
        return ""

    def _judge(self, step: Step) -> None:
        meter = self.trainer.steps
        what = meter.ends(step)
        if what is None:
            return
        if not step.seconds:  # it ends here, without its update
            self._end(step.number)
        self.steps.append(step.record())
        replay, checkpoint = meter.replay(step), self.trainer.last_checkpoint()
        raise stopped(what, self.trainer.args, step, checkpoint, replay)

    def _end(self, number: int) -> Step:
        if self._headroom is not None:
            self._headroom.end_step(number)
        ended: Step = self.trainer.steps.end()
        return ended

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the record of the step."""
        step = self._end(state.global_step)
        if not step.waits:
            self._keep(self.trainer.steps.read())
            return
        self._unread = step
        if any(getattr(control, name) for name in _SEEN):
            self.settle()

    def _keep(self, step: Step) -> None:
        self.steps.append(step.record())
        self._show(self.trainer.state, self.steps[-1])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the held-back loss."""
        self.settle()
        metrics = kwargs.get("metrics") or {}
        if "eval_loss" in metrics:
            self.evals.append(EvalRecord(step=state.global_step, loss=float(metrics["eval_loss"])))
            if self.view is not None and state.is_world_process_zero:
                self.view.evaluated(self.evals[-1])

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what the trainer logs of its own (rewards, margins, accuracies) with the step it has just made."""
        self.settle()
        logs = kwargs.get("logs") or {}
        if not self.steps or self.steps[-1].step != state.global_step:
            return
        metrics = {
            name: float(value)
            for name, value in logs.items()
            if isinstance(value, (int, float))
            and name not in _LOGGED_ANYWAY
            and not name.startswith(("eval_", "train_"))
        }
        if metrics:
            self.steps[-1] = replace(self.steps[-1], metrics=tuple(metrics.items()))
            if self.view is not None and state.is_world_process_zero:
                self.view.logged(self.steps[-1])

    def _show(self, state: Any, record: StepRecord | None) -> None:
        if self.view is not None and state.is_world_process_zero:
            self.view.update(state.global_step if record is None else record.step, state.max_steps, record)


class Kept(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Calls `write` after a step now and then, at a cost of at most one per cent of the time.

    Args:
        write: writes the report of the run so far; a disk that refuses it is told at the end of the run.
    """

    _LEAST_SECONDS = 10.0

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write
        self._next = time.perf_counter() + self._LEAST_SECONDS

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write where it is time to."""
        began = time.perf_counter()
        if began < self._next or not state.is_world_process_zero:
            return
        with contextlib.suppress(SaveError):
            self._write()
        took = time.perf_counter() - began
        self._next = began + max(self._LEAST_SECONDS, 100 * took)
