"""Ends a run early after a signal, or if evaluations do not improve (early stopping)."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from transformers import EarlyStoppingCallback

from isotype.compat.interrupt import HANGUP, stop_signals, terminate
from isotype.core.errors import Problem
from isotype.core.names import plural
from isotype.train.command.settings import Settings

_ECHO_SECONDS = 2.0
"""A launcher may repeat a signal within this number of seconds."""


@contextmanager
def graceful_stop(trainer: Any, console: Console) -> Iterator[list[int]]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP end the training after the current step, with a checkpoint.

    A second signal ends the training at once, except SIGHUP, because a closed terminal may send two SIGHUP.

    Yield the list of signals received so far. Outside the main thread, Python receives no signals, and the list stays
    empty. When the context ends, the former signal handlers are restored. However, if a signal has stopped the
    `isotype` command, further signals are ignored, so that the command can print how to resume.
    """
    from transformers import TrainerCallback

    stopped: list[int] = []
    began: list[float] = []
    owner = os.getpid()

    class Stop(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Every step counts the stopped processes. Processes exchange signals only if the count is not 0.
            alone = trainer.accelerator.num_processes == 1
            if (alone or trainer.steps.now.stops) and _any_process_stopped(trainer, stopped):
                control.should_save = control.should_training_stop = True

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # After a signal during an evaluation, the run makes no more step.
            if _any_process_stopped(trainer, stopped):
                control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if _any_process_stopped(trainer, stopped):
                control.should_training_stop = True

    def request_stop(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            return  # in a worker of the data loader: it gets the terminal's Ctrl-C, too, and ends with this process
        if stopped:
            if signum == HANGUP:
                return
            if trainer.accelerator.num_processes > 1 and time.monotonic() - began[0] < _ECHO_SECONDS:
                return
            raise KeyboardInterrupt
        began.append(time.monotonic())
        stopped.append(signum)
        with suppress(RuntimeError):  # raised by a stream whose write the signal has interrupted
            console.print("\nstopping after this step and saving a checkpoint; a second signal stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    trainer.add_callback(Stop)
    before = {s: signal.signal(s, request_stop) for s in stop_signals()}
    try:
        yield stopped
    finally:
        # `isotype` has set the handler `terminate`, so the whole process ends with this run.
        ending = bool(stopped) and before[signal.SIGTERM] is terminate
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ending else handler)


def _any_process_stopped(trainer: Any, stopped: list[int]) -> bool:
    """Return True in every process if any process has received a signal, so that all processes stop after the same step."""
    if trainer.accelerator.num_processes > 1:
        number = torch.tensor([stopped[0] if stopped else 0], device=trainer.args.device)
        numbers = trainer.accelerator.gather(number).tolist()
        stopped.extend(number for number in numbers if number and not stopped)
    return bool(stopped)


class EarlyStopping(EarlyStoppingCallback):  # type: ignore[misc]  # transformers ships no types
    """Callback that ends a training when the evaluation loss (or `--metric_for_best_model`) no longer improves."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the checkpoint's counter. Unlike the method of transformers, do not restore an earlier decision to stop."""
        saved = (state.stateful_callbacks or {}).get(type(self).__name__)
        counter = "early_stopping_patience_counter"
        if isinstance(saved, dict) and state.global_step:
            self.early_stopping_patience_counter = int(saved["attributes"].get(counter, 0))

    def description(self, state: Any, metric: str) -> str | None:
        """Return a message about the early stop if this callback has ended the training, else None."""
        counter, patience = self.early_stopping_patience_counter, self.early_stopping_patience
        if counter < patience or state.global_step >= state.max_steps:
            return None
        best = ""
        if state.best_metric is not None:
            best = f" (best: {state.best_metric:.4g}, at step {state.best_global_step})"
        count = plural(patience, "evaluation")
        return f"stopped early at step {state.global_step} of {state.max_steps}: {count} did not improve the {metric}{best}"


def early_stopping(settings: Settings) -> EarlyStopping | None:
    patience = settings.early_stopping_patience
    return None if patience is None else EarlyStopping(patience, settings.early_stopping_threshold)


def early_stopping_problems(settings: Settings) -> Iterator[Problem]:
    if settings.early_stopping_patience is None:
        if "early_stopping_threshold" in settings.command:
            setting = f"--early_stopping_threshold {settings.early_stopping_threshold:g}"
            yield Problem(setting, "also --early_stopping_patience", "--early_stopping_patience 3")
        return
    setting = f"--early_stopping_patience {settings.early_stopping_patience}"
    if settings.eval_split is None and settings.eval_strategy == "no":
        fix = "--eval_split 0.05, or --eval_strategy steps with a data set that has a test split"
        yield Problem(f"{setting} without an evaluation", "an evaluation on held-back rows", fix)


def balancing_note(trainer: Any) -> str | None:
    """Return a note on the routers' load-balancing loss, or None if the training loss does not include it."""
    config = trainer.model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return None
    times = getattr(config, "router_aux_loss_coef", 0.0)
    return f"the loss includes the routers' load-balancing loss times {times:g} (router_aux_loss_coef)"


def last_model_note(settings: Settings) -> str | None:
    """Return a note if early stopping saves the last model instead of the best model, else None."""
    if settings.early_stopping_patience is None or settings.load_best_model_at_end:
        return None
    return (
        "early stopping saves the model of its last step; --load_best_model_at_end True saves the best model (with "
        "--eval_strategy steps, and --save_steps a multiple of --eval_steps)"
    )
