"""Records the steps of a run, for the run report and the progress bar."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from isotype.core.dtypes import dtype_name
from isotype.core.errors import SaveError, first_line
from isotype.model.walk import blocks_in
from isotype.report.run.headroom import Headroom, HeadroomSample
from isotype.report.run.record import EvalRecord, RunRecord, StepRecord
from isotype.train.monitor.meter import Step, skipping_optimizer
from isotype.train.monitor.progress import ProgressView

_EVERY = 50
"""Largest number of steps between two samples. A short run is sampled more often, about twenty times in total."""


class HeadroomMeter:
    """Samples the largest magnitude of each block's output in the first micro-batch of some steps."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        self._blocks = {names[id(block)]: block for block in blocks_in(model, fewest=2)}
        self._every = min(_EVERY, max(1, steps // 20))
        self._handles: dict[str, Any] = {}
        self._largest: dict[str, torch.Tensor] = {}
        self._samples: list[HeadroomSample] = []
        self._dtype = "float16"

    def begin_step(self, step: int) -> None:
        """Begin step number `step` (counted from 1). Install forward hooks if the step is sampled."""
        self._leave()
        if (step - 1) % self._every == 0:
            self._handles = {
                name: block.register_forward_hook(partial(self._look, name))
                for name, block in self._blocks.items()
            }

    def end_step(self, step: int) -> None:
        """Read the sample if the step was sampled. Reading makes the host wait for the device."""
        self._leave()
        if self._largest:
            self._blocks = {name: block for name, block in self._blocks.items() if name in self._largest}
            values = torch.stack([self._largest[name].float() for name in self._blocks]).tolist()
            finite = (math.inf if math.isnan(value) else value for value in values)  # NaN follows an overflow
            self._samples.append(HeadroomSample(step, tuple(finite)))
            self._largest.clear()

    def record(self) -> Headroom | None:
        """Return the samples so far; None if there is no sample (as in a model without blocks)."""
        if not self._samples:
            return None
        return Headroom(tuple(self._blocks), self._dtype, tuple(self._samples))

    def _look(self, name: str, block: nn.Module, args: Any, result: Any) -> None:
        if block is not self._blocks.get(name):
            return  # a block of the copy that the preflight traces
        handle = self._handles.pop(name, None)
        if handle is None or not block.training:
            return
        handle.remove()
        value = result[0] if isinstance(result, (tuple, list)) else result
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            self._dtype = dtype_name(value.dtype)
            self._largest[name] = torch.linalg.vector_norm(value.detach(), torch.inf)

    def _leave(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


_LOGGED_ANYWAY = ("loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "total_flos")

_ACTIONS = ("should_log", "should_evaluate", "should_save", "should_training_stop", "should_epoch_stop")
"""Fields of `TrainerControl` that request an action of the trainer after the current step."""


class RunRecorder(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Callback that makes a `StepRecord` of every optimizer step of a `PolicyTrainer`.

    All processes make these records, so that all processes end a run at the same step. Only rank 0 shows the progress. If
    the optimizer can skip updates on the device (`isotype.train.monitor.meter`), a step is checked and recorded while the
    next step runs. The trainer saves, logs or evaluates only after the last step is recorded.

    Args:
        view: shows the progress, or None to show nothing.
        earlier: report of the run up to the resumed checkpoint, or None for a new run.

    Attributes:
        steps, evals: records of the steps and of the evaluations. The records of `earlier` come first.
        resumed_from: step of the resumed checkpoint, or None for a new run.
    """

    def __init__(
        self, trainer: Any, view: ProgressView | None = None, earlier: RunRecord | None = None
    ) -> None:
        self.trainer, self.view = trainer, view
        self.steps: list[StepRecord] = [] if earlier is None else list(earlier.steps)
        self.evals: list[EvalRecord] = [] if earlier is None else list(earlier.evals)
        self._earlier = earlier
        self._steps_before = len(self.steps)
        self.resumed_from: int | None = None
        self._headroom: HeadroomMeter | None = None
        self._skipping: Any = None  # the optimizer of this step, if it skips updates by itself
        self._unread: Step | None = None  # the last step, if its values are still on the device

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The checkpoint, which has this step in its name, may be deleted before the end.
        self.resumed_from = state.global_step or None
        if getattr(args, "fp16", False):
            self._headroom = HeadroomMeter(self.trainer.model, state.max_steps)
        self._show(state, None)

    def headroom(self) -> Headroom | None:
        """Return the largest output values of each block so far in a float16 run, or None in another dtype."""
        measured = None if self._headroom is None else self._headroom.record()
        before = None if self._earlier is None else self._earlier.headroom
        if measured is None or before is None or measured.blocks != before.blocks:
            return measured or before
        return replace(measured, samples=(*before.samples, *measured.samples))

    @property
    def made_steps(self) -> bool:
        return len(self.steps) > self._steps_before

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.settle()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        number = state.global_step + 1
        if self._headroom is not None:
            self._headroom.begin_step(number)
        self.trainer.steps.begin(number, float(kwargs["lr_scheduler"].get_last_lr()[0]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the update, raise TrainingError with the operator at fault if the loss or gradient norm is not finite."""
        self.settle()
        self._skipping = skipping_optimizer(kwargs["optimizer"], self.trainer.accelerator, args.device)
        if self._skipping is None:
            self._check(self.trainer.steps.read())
            return
        step = self.trainer.steps.launch()
        self._skipping.found_inf = step.broken()
        step.send()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._skipping is not None:
            del self._skipping.found_inf
            self._skipping = None

    def settle(self) -> None:
        """Read and record the last step, if this was not done yet. Raise TrainingError if its loss or gradient norm is not finite."""
        step, self._unread = self._unread, None
        if step is not None:
            step.read()
            self._check(step)
            self._record(step)

    def record_unread(self) -> str:
        """After an exception, record the step whose values were not read. Return "", or the reason why the step has no record."""
        step, self._unread = self._unread, None
        if step is None:
            return ""
        try:
            step.read()
        except RuntimeError as error:  # the device may have failed
            reason = f"its loss cannot be read from the device ({first_line(error)})"
            return f"step {step.number} is not in the report: {reason}"
        self.steps.append(step.record())
        return ""

    def _check(self, step: Step) -> None:
        what = self.trainer.steps.ends(step)
        if what is None:
            return
        if not step.seconds:  # the step ends without its update
            self._end(step.number)
        self.steps.append(step.record())
        raise self.trainer.steps.stopped(what, step)

    def _end(self, number: int) -> Step:
        if self._headroom is not None:
            self._headroom.end_step(number)
        ended: Step = self.trainer.steps.end()
        return ended

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = self._end(state.global_step)
        if not step.waits:
            self._record(self.trainer.steps.read())
            return
        self._unread = step
        if any(getattr(control, name) for name in _ACTIONS):
            self.settle()

    def _record(self, step: Step) -> None:
        self.steps.append(step.record())
        self._show(self.trainer.state, self.steps[-1])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.settle()
        metrics = kwargs.get("metrics") or {}
        if "eval_loss" in metrics:
            self.evals.append(EvalRecord(step=state.global_step, loss=float(metrics["eval_loss"])))
            if self.view is not None and state.is_world_process_zero:
                self.view.evaluated(self.evals[-1])

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the metrics that the trainer logs (rewards, margins, accuracies) to the record of the last step."""
        self.settle()
        logs = kwargs.get("logs") or {}
        if not self.steps or self.steps[-1].step != state.global_step:
            return
        numbers = ((n, float(v)) for n, v in logs.items() if isinstance(v, (int, float)))
        others = ((n, v) for n, v in numbers if not n.startswith(("eval_", "train_")))
        metrics = {name: value for name, value in others if name not in _LOGGED_ANYWAY}
        if metrics:
            self.steps[-1] = replace(self.steps[-1], metrics=tuple(metrics.items()))
            if self.view is not None and state.is_world_process_zero:
                self.view.logged(self.steps[-1])

    def _show(self, state: Any, record: StepRecord | None) -> None:
        if self.view is not None and state.is_world_process_zero:
            self.view.update(state.global_step if record is None else record.step, state.max_steps, record)


class PeriodicReport(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Callback in rank 0 that writes the report of the run so far. Writing takes at most 1% of the training's time.

    A SaveError from `write` is ignored, because the report is written again at the end of the run.
    """

    _LEAST_SECONDS = 10.0

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write
        self._next = time.perf_counter() + self._LEAST_SECONDS

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        if began < self._next or not state.is_world_process_zero:
            return
        with contextlib.suppress(SaveError):
            self._write()
        took = time.perf_counter() - began
        self._next = began + max(self._LEAST_SECONDS, 100 * took)
