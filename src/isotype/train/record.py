"""Collect what a run does while it does it: one record a step, for the run report and the progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from isotype.report.run import EvalRecord, StepRecord


class RunRecorder(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Makes a `StepRecord` of every optimizer step of a governed trainer and hands it to `on_record`.

    Attributes:
        steps: the records so far; a resumed run starts with none.
        evals: held-back losses so far.
        resumed_from: the step that the run went on from, None for a start from the beginning.
    """

    def __init__(self, trainer: Any, on_record: Callable[[StepRecord, int], None] | None = None) -> None:
        self.trainer = trainer
        self.on_record = on_record
        self.steps: list[StepRecord] = []
        self.evals: list[EvalRecord] = []
        self.resumed_from: int | None = None
        self._began = 0.0
        self._learning_rate = 0.0
        self._grad_norm: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the run starts; the checkpoint may have been rotated away by the end."""
        self.resumed_from = state.global_step or None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock; the learning rate is the one this step will be taken with."""
        self._began = time.perf_counter()
        self._learning_rate = float(kwargs["lr_scheduler"].get_last_lr()[0])
        self._grad_norm = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The norm of the gradients as the optimizer sees them: unscaled, and clipped where that was asked for."""
        squares = [
            p.grad.detach().float().pow(2).sum() for p in kwargs["model"].parameters() if p.grad is not None
        ]
        if squares:
            # The Trainer unscales them only on its way to clip them.
            scaler = self.trainer.accelerator.scaler
            scaled = scaler is not None and scaler.is_enabled() and not args.max_grad_norm
            norm = math.sqrt(float(torch.stack(squares).sum()))
            self._grad_norm = norm / scaler.get_scale() if scaled else norm

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the record of the step."""
        tokens, loss = self.trainer.take_step_measures()
        accelerator = self.trainer.accelerator
        scaler = accelerator.scaler
        record = StepRecord(
            step=state.global_step,
            loss=loss,
            learning_rate=self._learning_rate,
            grad_norm=self._grad_norm,
            tokens=tokens,
            seconds=time.perf_counter() - self._began,
            memory_bytes=memory_in_use(),
            loss_scale=float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None,
            skipped=bool(accelerator.optimizer_step_was_skipped),
        )
        self.steps.append(record)
        if self.on_record is not None:
            self.on_record(record, state.max_steps)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the held-back loss."""
        metrics = kwargs.get("metrics") or {}
        if "eval_loss" in metrics:
            self.evals.append(EvalRecord(step=state.global_step, loss=float(metrics["eval_loss"])))


def memory_in_use() -> int:
    """Bytes in use: of the accelerator where there is one (allocated by torch), else of this process (resident)."""
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    import psutil

    return int(psutil.Process().memory_info().rss)
