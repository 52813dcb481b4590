"""Shows the progress of a run as a live bar in a terminal, and as plain lines elsewhere."""

import logging
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from isotype.report.run.record import EvalRecord, StepRecord, format_loss, reward_words, rewards_of
from isotype.report.text import format_duration

_ROOMY = 75  # columns from which the bar is shown beside the numbers
_WIDE = 100  # columns from which the line also shows the held-back loss and the elapsed time
_WIDEST = 130  # columns from which the line also shows learning rate and gradient norm


@dataclass(frozen=True)
class _Inset:
    """Renders `inner` narrower than the console, because a terminal prints ^C after the live line."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update(width=options.max_width - len(" ^C")))


class _Bar(Progress):
    def get_renderables(self) -> Iterable[RenderableType]:
        yield _Inset(self.make_tasks_table(self.tasks))


class ProgressView:
    """Context manager that shows loss, learning rate, gradient norm, tokens per second and remaining time of a run.

    A terminal shows every step in a live bar. Any other console gets one line every `every` steps.
    """

    def __init__(self, console: Console, every: int = 1) -> None:
        self.console, self.every = console, max(1, every)
        roomy, wide, widest = (console.width >= columns for columns in (_ROOMY, _WIDE, _WIDEST))
        self._bar = _Bar(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            *([BarColumn(bar_width=None)] if roomy else []),
            TextColumn("loss {task.fields[loss]}"),
            *([TextColumn("{task.fields[held]}")] if wide else []),
            *([TextColumn("lr {task.fields[rate]}")] if widest else []),
            *([TextColumn("norm {task.fields[norm]}")] if widest else []),
            TextColumn("{task.fields[speed]:>7} tokens/s"),
            *([TimeElapsedColumn()] if wide else []),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=False,
            disable=not console.is_terminal,
            speed_estimate_period=math.inf,  # with rich's default of 30 s, longer steps have no estimate
        )
        fields: dict[str, Any] = {"loss": "  …   ", "held": "", "rate": "…", "norm": "…", "speed": "…"}
        self._task = self._bar.add_task("train", total=None, visible=False, **fields)
        self._moved: list[logging.StreamHandler[TextIO]] = []
        self._seconds: list[float] = []
        self._reward = ""

    def __enter__(self) -> Self:
        self._moved = _handlers_on(sys.stderr)
        self._bar.start()  # rich replaces sys.stderr
        for handler in self._moved:
            handler.setStream(sys.stderr)
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()
        for handler in self._moved:
            handler.setStream(sys.stderr)

    def update(self, step: int, total: int, record: StepRecord | None) -> None:
        """Show that `step` of `total` steps are done. `record` describes the last step (None before the first step)."""
        if record is None:
            self._bar.update(self._task, completed=step, total=total, visible=True)
            return
        self._seconds.append(record.seconds)
        shown: dict[str, Any] = {
            "rate": f"{record.learning_rate:.2e}",
            "norm": "…" if record.grad_norm is None else f"{record.grad_norm:.3g}",
            "speed": f"{record.tokens / record.seconds if record.seconds else 0.0:,.0f}",
        }
        if self.console.is_terminal:
            loss = f"{record.loss:.4f}{' (skipped)' if record.skipped else ''}{self._reward}"
            self._bar.update(self._task, completed=step, total=total, **{**shown, "loss": loss})
        elif step == total or step % self.every == 0:
            skipped = " (skipped: overflow)" if record.skipped else ""
            # The first step is slower: kernels and caches are built in it.
            pace = statistics.median(self._seconds[1:] or self._seconds)
            seconds = pace * (total - step)
            time_left = format_duration(seconds) if seconds >= 60 else f"{max(1, round(seconds))} s"
            left = f"  {time_left} left" if step < total else ""
            self._say(
                f"step {step}/{total}  loss {record.loss:.4f}{skipped}  lr {shown['rate']}  grad norm {shown['norm']}  "
                f"{shown['speed']} tokens/s{left}"
            )

    def evaluated(self, evaluation: EvalRecord) -> None:
        if self.console.is_terminal:
            self._bar.update(self._task, held=f"held-back {evaluation.loss:.4f}")
        else:
            self._say(f"step {evaluation.step}  held-back loss {evaluation.loss:.4f}")

    def logged(self, record: StepRecord) -> None:
        rewards = rewards_of(record)
        if rewards is None:
            return
        if self.console.is_terminal:
            self._reward = f"  reward {format_loss(rewards.mean)}" * (self.console.width >= _ROOMY)
            self._reward += f" ± {format_loss(rewards.spread)}" * (self.console.width >= _WIDE)
        else:
            self._say(f"step {record.step}  {reward_words(rewards)}")

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


def _handlers_on(stream: TextIO) -> list[logging.StreamHandler[TextIO]]:
    """Return the log handlers that write to `stream`.

    While a live bar is shown, rich replaces `sys.stderr` with a stream that writes above the bar. A log handler that
    still has the former `sys.stderr` (such as transformers' handler) would write into the bar.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return [
        handler
        for logger in loggers
        if isinstance(logger, logging.Logger)  # not a placeholder for a parent
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
        # `logging.lastResort` stores no stream: it reads sys.stderr each time
        and vars(handler).get("stream") is stream
    ]
