"""Early ends of a run: signals, which let the step end and be saved, and evaluations that stop improving."""

from __future__ import annotations

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
"""Time after a signal in which a launcher may forward one that the terminal has already sent."""


@contextmanager
def graceful_stop(trainer: Any, console: Console) -> Iterator[list[int]]:
    """Let the step end and save a checkpoint at the first Ctrl-C, SIGTERM or SIGHUP; stop at once at the second.

    A terminal that hangs up may send SIGHUP twice (kernel and shell), which never stops at once.

    Yields the signals so far. Nothing changes outside the main thread, where Python receives no signals. Handlers are
    restored afterwards; after a stop, signals are ignored until the process ends, so that it can print how to resume.
    """
    from transformers import TrainerCallback

    stopped: list[int] = []
    began: list[float] = []
    owner = os.getpid()

    class Stop(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # With several processes every step's values include stop requests; only then is the signal exchanged.
            alone = trainer.accelerator.num_processes == 1
            if (alone or trainer.steps.now.stops) and _agreed(trainer, stopped):
                control.should_save = control.should_training_stop = True

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # A signal during an evaluation need not wait for one more step.
            if _agreed(trainer, stopped):
                control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if _agreed(trainer, stopped):
                control.should_training_stop = True

    def ask_to_stop(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            return  # a data loader's worker: the terminal sends Ctrl-C to it as well, and it ends with its parent
        if stopped:
            if signum == HANGUP:
                return
            if trainer.accelerator.num_processes > 1 and time.monotonic() - began[0] < _ECHO_SECONDS:
                return
            raise KeyboardInterrupt
        began.append(time.monotonic())
        stopped.append(signum)
        with suppress(RuntimeError):  # raised by a stream that the signal has found in the middle of a write
            console.print("\nstopping after this step and saving a checkpoint; once more to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    trainer.add_callback(Stop)
    before = {s: signal.signal(s, ask_to_stop) for s in stop_signals()}
    try:
        yield stopped
    finally:
        # `isotype` sets this handler: the process is its own.
        ending = bool(stopped) and before[signal.SIGTERM] is terminate
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ending else handler)


def _agreed(trainer: Any, stopped: list[int]) -> bool:
    """Return True if a process of the run was asked to stop, so that all stop after the same step."""
    if trainer.accelerator.num_processes > 1:
        asked = torch.tensor(stopped[0] if stopped else 0, device=trainer.args.device)
        numbers = trainer.accelerator.gather(asked.reshape(1)).tolist()
        stopped.extend(number for number in numbers if number and not stopped)
    return bool(stopped)


# ------------------------------------------------------------------------------------------------------ --early_stopping_patience


class EarlyStopping(EarlyStoppingCallback):  # type: ignore[misc]  # transformers ships no types
    """Callback that ends a training whose held-back loss, or `--metric_for_best_model`, stops improving."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the checkpoint's count; transformers would also restore a former run's stop."""
        saved = (state.stateful_callbacks or {}).get(type(self).__name__)
        counter = "early_stopping_patience_counter"
        if isinstance(saved, dict) and state.global_step:
            self.early_stopping_patience_counter = int(saved["attributes"].get(counter, 0))

    def said(self, state: Any, metric: str) -> str | None:
        """Describe the end of the training, if this ended it."""
        if (
            self.early_stopping_patience_counter < self.early_stopping_patience
            or state.global_step >= state.max_steps
        ):
            return None
        best = ""
        if state.best_metric is not None:
            best = f": {state.best_metric:.4g}, at step {state.best_global_step}"
        count = plural(self.early_stopping_patience, "evaluation")
        return f"stopped early at step {state.global_step} of {state.max_steps}: {count} without a better {metric} than the best{best}"


def early_stopping(settings: Settings) -> EarlyStopping | None:
    """Return the callback of `--early_stopping_patience`; None if not given."""
    patience = settings.extra.early_stopping_patience
    if patience is None:
        return None
    return EarlyStopping(patience, settings.extra.early_stopping_threshold)


def early_stopping_problems(settings: Settings) -> Iterator[Problem]:
    """Yield a problem if there is no evaluation to judge by."""
    extra, training = settings.extra, settings.training
    if extra.early_stopping_patience is None:
        if "early_stopping_threshold" in settings.command:
            setting = f"--early_stopping_threshold {extra.early_stopping_threshold:g}"
            yield Problem(setting, "--early_stopping_patience with it", "--early_stopping_patience 3")
        return
    setting = f"--early_stopping_patience {extra.early_stopping_patience}"
    if extra.eval_split is None and training.eval_strategy == "no":
        fix = "--eval_split 0.05, or --eval_strategy steps with a data set that has a test split"
        yield Problem(f"{setting} without an evaluation", "held-back rows to go by", fix)


def balance(trainer: Any) -> str | None:
    """Describe the routers' load-balancing loss; None if it is not in the loss."""
    config = trainer.model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return None
    times = getattr(config, "router_aux_loss_coef", 0.0)
    return f"the balance loss of the routers is in the loss, times {times:g} (router_aux_loss_coef)"


def not_the_best(settings: Settings) -> str | None:
    """Return a note if the last model is saved and not the best."""
    training = settings.training
    if settings.extra.early_stopping_patience is None or training.load_best_model_at_end:
        return None
    return (
        "early stopping saves the model of its last step; --load_best_model_at_end True saves the best one (it needs "
        "--eval_strategy steps, and --save_steps that are a multiple of --eval_steps)"
    )
