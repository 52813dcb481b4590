"""Seconds and losses of the steps of any transformers Trainer, for the benchmarks that train."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def watch(clock: Callable[[], float] = time.perf_counter) -> tuple[list[float], list[float]]:
    """Seconds of every optimizer step by a clock, and its loss, of any Trainer that is made from now on."""
    from transformers import TrainerCallback, trainer

    seconds: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        began = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            _wait()
            self.began = clock()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            _wait()
            seconds.append(clock() - self.began)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    trainer.DEFAULT_CALLBACKS.append(Clock)
    return seconds, losses


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
