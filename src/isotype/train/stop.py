"""Stopping a run without losing it: signals that let the step end, and the command that goes on from there."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from isotype.compat.interrupt import terminate
from isotype.train import describe
from isotype.train.launched import under_launcher
from isotype.train.settings import Settings

_ECHO_SECONDS = 2.0
"""Time after a signal in which a launcher may hand on the one that the terminal has sent to its processes already."""


@contextmanager
def graceful_stop(trainer: Any, console: Console) -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM lets the step end and saves a checkpoint; the second stops at once.

    Yields the signals so far. Outside the main thread, where Python takes no signals, it changes nothing. Handlers are
    put back afterwards; in a command of ours that was stopped, signals are ignored instead until the process ends: what
    is left to do is to say where the run stopped and how to go on.
    """
    from transformers import TrainerCallback

    stopped: list[int] = []
    began: list[float] = []
    owner = os.getpid()

    class Stop(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Of several processes this comes with what is read of every step; the signal is looked for where somebody has one.
            alone = trainer.accelerator.num_processes == 1
            if (alone or trainer.stop_asked) and _agreed(trainer, stopped):
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
            if trainer.accelerator.num_processes > 1 and time.monotonic() - began[0] < _ECHO_SECONDS:
                return
            raise KeyboardInterrupt
        began.append(time.monotonic())
        stopped.append(signum)
        console.print("\nstopping after this step and saving a checkpoint; once more to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    trainer.add_callback(Stop)
    trainer.asks_to_stop = lambda: bool(stopped)
    before = {s: signal.signal(s, ask_to_stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        # `isotype` sets this handler: the process is its own.
        ending = bool(stopped) and before[signal.SIGTERM] is terminate
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ending else handler)


def _agreed(trainer: Any, stopped: list[int]) -> bool:
    """Whether a process of the run was asked to stop; a signal reaches one before another, and all stop after the same step."""
    if trainer.accelerator.num_processes > 1:
        asked = torch.tensor(stopped[0] if stopped else 0, device=trainer.args.device)
        numbers = trainer.accelerator.gather(asked.reshape(1)).tolist()
        stopped.extend(number for number in numbers if number and not stopped)
    return bool(stopped)


def resume_command(settings: Settings, checkpoint: Path) -> str:
    """The command that goes on from `checkpoint`."""
    argv: list[str] = []
    flag = re.compile(r"--resume[_-]from[_-]checkpoint(=.*)?")
    tokens = iter(settings.argv)
    for token in tokens:
        match = flag.fullmatch(token)
        if match is None:
            argv.append(token)
        elif match[1] is None:
            next(tokens, None)
    if "output_dir" not in settings.explicit:
        argv += ["--output_dir", settings.training.output_dir]
    launcher, argv = under_launcher(argv)
    command = describe.command_line(
        [settings.method.name, *argv, "--resume_from_checkpoint", str(checkpoint)]
    )
    return launcher + command
