"""Collect what a run does while it does it: one record a step, for the run report and the progress bar."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import psutil
import torch
from torch import nn
from transformers import TrainerCallback

from isotype.core.dtypes import dtype_name
from isotype.core.errors import SaveError, first_line
from isotype.model.walk import blocks_in
from isotype.report.run.headroom import Headroom, HeadroomSample
from isotype.report.run.record import EvalRecord, RunRecord, StepRecord
from isotype.train.monitor.diverged import stopped
from isotype.train.monitor.step_values import LaunchedValues, StepValues, skipping_optimizer
from isotype.train.monitor.watch import MicroBatches, StepBatches

_EVERY = 50
"""Steps between two looks; in short runs fewer, so that there are some twenty."""


class HeadroomMeter:
    """Samples the largest magnitude of every block's output in the first micro-batch of some steps.

    Between two looks nothing of it is on the model.

    Args:
        model: the trainer's.
        steps: optimizer steps of the run.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        self._blocks = {names[id(block)]: block for block in blocks_in(model, fewest=2)}
        self._every = min(_EVERY, max(1, steps // 20))
        self._handles: dict[str, Any] = {}
        self._seen: dict[str, torch.Tensor] = {}
        self._samples: list[HeadroomSample] = []
        self._dtype = "float16"

    def begin_step(self, step: int) -> None:
        """Step `step`, counted from 1, begins: look at it if it is its turn."""
        self._leave()
        if (step - 1) % self._every == 0:
            self._handles = {
                name: block.register_forward_hook(self._looking(name)) for name, block in self._blocks.items()
            }

    def end_step(self, step: int) -> None:
        """Read what was seen; the one time that it is waited for."""
        self._leave()
        if self._seen:
            self._blocks = {name: block for name, block in self._blocks.items() if name in self._seen}
            largest = torch.stack([self._seen[name].float() for name in self._blocks]).tolist()
            # NaN follows an overflow.
            values = (math.inf if math.isnan(value) else value for value in largest)
            self._samples.append(HeadroomSample(step, tuple(values)))
            self._seen.clear()

    def record(self) -> Headroom | None:
        """The samples so far; None for a model without blocks, or before the first look."""
        if not self._samples:
            return None
        return Headroom(tuple(self._blocks), self._dtype, tuple(self._samples))

    def _looking(self, name: str) -> Any:
        def look(block: nn.Module, args: Any, result: Any) -> None:
            if block is not self._blocks.get(name):
                return  # the preflight's copy of the model
            handle = self._handles.pop(name, None)
            if handle is None or not block.training:
                return
            handle.remove()
            value = result[0] if isinstance(result, (tuple, list)) else result
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._dtype = dtype_name(value.dtype)
                self._seen[name] = torch.linalg.vector_norm(value.detach(), torch.inf)

        return look

    def _leave(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


_LOGGED_ANYWAY = frozenset(
    {"loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "total_flos"}
)

_SEEN = ("should_log", "should_evaluate", "should_save", "should_training_stop", "should_epoch_stop")
"""What a trainer's control says where something is about to be done with the step that has ended."""

SAMPLING_SECONDS = 0.02
"""Time between two looks at the resident size of the process."""


@dataclass(frozen=True)
class _Deferred:
    """A step whose values are on their way to the host, and what else is known of it."""

    record: StepRecord
    values: LaunchedValues
    batches: MicroBatches

    def read(self) -> tuple[StepValues, StepRecord]:
        """The values, and the record with them; waits until they have arrived."""
        values = self.values.read()
        return values, replace(
            self.record, loss=values.loss, grad_norm=values.grad_norm, tokens=values.tokens
        )


class RunRecorder(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Makes a `StepRecord` of every optimizer step of a trainer under a policy.

    Of several processes each holds the records, so that all judge the run alike; only the first shows progress. Where the device leaves out an
    update by itself (`isotype.train.monitor.step_values`), a step is judged and recorded while the next one runs, or before anything is saved,
    logged or measured of it.

    Args:
        trainer: from `isotype.train.trainer.policy_trainer`.
        on_progress: called with (steps done, steps in all, record of the last one): once with None before the
            first step, then after every step.
        on_evaluated: called with every held-back loss.
        on_logged: called with a step that the trainer has logged metrics of its own after.
        keep: called after every step and evaluation; writes the report of the run so far.
        earlier: the report of the run up to the checkpoint that it goes on from.

    Attributes:
        steps: the records so far; those of `earlier` come first.
        evals: held-back losses so far, likewise.
        resumed_from: the step that the run went on from, None for a start from the beginning.
    """

    def __init__(
        self,
        trainer: Any,
        on_progress: Callable[[int, int, StepRecord | None], None] | None = None,
        on_evaluated: Callable[[EvalRecord], None] | None = None,
        keep: Callable[[], None] | None = None,
        earlier: RunRecord | None = None,
        on_logged: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.trainer = trainer
        self.on_progress = on_progress
        self.on_evaluated, self.on_logged = on_evaluated, on_logged
        self.keep = keep
        self.steps: list[StepRecord] = [] if earlier is None else list(earlier.steps)
        self.evals: list[EvalRecord] = [] if earlier is None else list(earlier.evals)
        self._earlier = earlier
        self._steps_before = len(self.steps)
        self.resumed_from: int | None = None
        self._began = 0.0
        self._learning_rate = 0.0
        self._watch = StepBatches(trainer)
        self._headroom: HeadroomMeter | None = None
        self._skipping: Any = None  # the optimizer that leaves an update out by itself, in this step
        self._launched: LaunchedValues | None = None
        self._deferred: _Deferred | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the run starts; the checkpoint may have been rotated away by the end."""
        self.resumed_from = state.global_step or None
        self._watch.attach()
        self.trainer.before_saving = self.settle
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
        """Leave the trainer as it was."""
        self.settle()
        self._watch.detach()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock; the learning rate is the one this step will be taken with."""
        self._watch.begin_step()
        if self._headroom is not None:
            self._headroom.begin_step(state.global_step + 1)
        self._began = time.perf_counter()
        self._learning_rate = float(kwargs["lr_scheduler"].get_last_lr()[0])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run before an update that would ruin the weights, and say which operator is to blame.

        Raises:
            TrainingError: loss or gradient are not finite, see `Verdict`.
        """
        self.settle()
        self._skipping = skipping_optimizer(kwargs["optimizer"], self.trainer.accelerator, args.device)
        if self._skipping is not None:
            self._launched = self.trainer.launch_step_values()
            self._skipping.found_inf = self._launched.broken()
            return
        values = self.trainer.step_values()
        what = self._watch.ends(values)
        if what is not None:
            record = self._record(state.global_step + 1, values)
            if self._headroom is not None:
                self._headroom.end_step(record.step)
            self._end(what, record, values, self._watch.batches())

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
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return
        values, record = deferred.read()
        what = self._watch.ends(values)
        if what is not None:
            self._end(what, record, values, deferred.batches)
        self.steps.append(record)
        self._show(self.trainer.state, record)

    def record_unread(self) -> str:
        """When an exception has ended the run: record the step that the host has not looked at yet, without judging it.

        Returns:
            why it is not in the report, as a sentence; empty where it is, or where there was none.
        """
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return ""
        try:
            _, record = deferred.read()
        except RuntimeError as error:  # what has failed may be the device
            reason = first_line(error)
            return f"step {deferred.record.step} is not in the report: its loss cannot be read from the device ({reason})"
        self.steps.append(record)
        return ""

    def _end(self, what: str, record: StepRecord, values: StepValues, batches: MicroBatches) -> NoReturn:
        self.steps.append(record)
        again, checkpoint = self._watch.again(values.scale, batches), self.trainer.last_checkpoint()
        raise stopped(what, self.trainer.args, record.step, values, record.learning_rate, checkpoint, again)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the record of the step."""
        if self._headroom is not None:
            self._headroom.end_step(state.global_step)
        if self._launched is not None:
            values, self._launched = self._launched.sent(), None
            record = self._record(state.global_step, StepValues(0, math.nan, None))
            self._deferred = _Deferred(record, values, self._watch.batches())
            if any(getattr(control, name) for name in _SEEN):
                self.settle()
            return
        self.steps.append(self._record(state.global_step, self.trainer.step_values()))
        self._show(state, self.steps[-1])

    def _record(self, step: int, values: StepValues) -> StepRecord:
        return StepRecord(
            step=step,
            loss=values.loss,
            learning_rate=self._learning_rate,
            grad_norm=values.grad_norm,
            tokens=values.tokens,
            seconds=time.perf_counter() - self._began,
            memory_bytes=self.trainer.take_step(),
            loss_scale=values.scale,
            skipped=bool(self.trainer.accelerator.optimizer_step_was_skipped),
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the held-back loss."""
        self.settle()
        metrics = kwargs.get("metrics") or {}
        if "eval_loss" in metrics:
            self.evals.append(EvalRecord(step=state.global_step, loss=float(metrics["eval_loss"])))
            if self.on_evaluated is not None and state.is_world_process_zero:
                self.on_evaluated(self.evals[-1])

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
            if self.on_logged is not None and state.is_world_process_zero:
                self.on_logged(self.steps[-1])

    def _show(self, state: Any, record: StepRecord | None) -> None:
        if self.on_progress is not None and state.is_world_process_zero:
            self.on_progress(state.global_step if record is None else record.step, state.max_steps, record)
        if self.keep is not None and record is not None and state.is_world_process_zero:
            self.keep()


class Kept:
    """Calls `write` now and then, at a cost of at most one per cent of the time.

    Args:
        write: writes the report of the run so far; a disk that refuses it is told at the end of the run.
    """

    _LEAST_SECONDS = 10.0

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write
        self._next = time.perf_counter() + self._LEAST_SECONDS

    def __call__(self) -> None:
        began = time.perf_counter()
        if began < self._next:
            return
        with contextlib.suppress(SaveError):
            self._write()
        took = time.perf_counter() - began
        self._next = began + max(self._LEAST_SECONDS, 100 * took)


class MemoryMeter(Protocol):
    """The most memory in use since a moment."""

    def restart(self) -> None:
        """Forget what was; start with what is in use now."""

    def peak(self) -> int:
        """Bytes, the most since `restart`."""


@contextmanager
def memory_meter(device: torch.device) -> Iterator[MemoryMeter]:
    """A meter for the time of a run.

    On CUDA, ROCm and XPU it is torch's own count of what it has allocated on `device`, which misses no peak. Else it
    is the resident size of this process, looked at every `SAMPLING_SECONDS` and at both ends: a peak between two
    looks is missed. (The kernel's own mark, `ru_maxrss`, cannot be set back, and starts with the peak of loading.)
    """
    if device.type in ("cuda", "xpu"):
        yield _Allocated(device)
        return
    with _Resident() as meter:
        yield meter


class _Allocated:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend = torch.get_device_module(device)

    def restart(self) -> None:
        self._backend.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return int(self._backend.max_memory_allocated(self._device))


class _Resident:
    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="isotype-memory", daemon=True)

    def __enter__(self) -> _Resident:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()

    def restart(self) -> None:
        with self._lock:
            self._peak = self._size()

    def peak(self) -> int:
        with self._lock:
            self._peak = max(self._peak, self._size())
            return self._peak

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLING_SECONDS):
            self.peak()

    def _size(self) -> int:
        return int(self._process.memory_info().rss)
