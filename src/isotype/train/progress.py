"""The progress of a run in the terminal: a live bar, or plain lines where there is no terminal."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from isotype.report.run import StepRecord

_LINES = 20  # how many lines a run without a terminal prints
_ROOMY = 75  # columns from which on there is room for a bar beside the numbers
_WIDE = 100  # columns from which on the bar also says how long the run has taken


@dataclass(frozen=True)
class _Inset:
    """`inner`, ending short of the edge: the ^C that a terminal echoes after it would wrap, and tear a live line."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update(width=options.max_width - len(" ^C")))


class _Bar(Progress):
    def get_renderables(self) -> Iterable[RenderableType]:
        yield _Inset(self.make_tasks_table(self.tasks))


class ProgressView:
    """A context in which `update` shows a step: loss, tokens a second, time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        roomy, wide = (console.width >= columns for columns in (_ROOMY, _WIDE))
        self._bar = _Bar(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            *([BarColumn(bar_width=None)] if roomy else []),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]:>7} tokens/s"),
            *([TimeElapsedColumn()] if wide else []),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=False,
            disable=not console.is_terminal,
            speed_estimate_period=math.inf,  # rich looks back 30 s; where a step takes longer it would know nothing
        )
        self._task = self._bar.add_task("train", total=None, visible=False, loss="  …   ", rate="…")
        self._moved: list[logging.StreamHandler[TextIO]] = []

    def __enter__(self) -> ProgressView:
        self._moved = _handlers_on(sys.stderr)
        self._bar.start()  # from here on sys.stderr is rich's
        for handler in self._moved:
            handler.setStream(sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        for handler in self._moved:
            handler.setStream(sys.stderr)

    def update(self, step: int, total: int, record: StepRecord | None) -> None:
        """Show that `step` of `total` steps are done; `record` is of the last one, None before the first."""
        if record is None:
            self._bar.update(self._task, completed=step, total=total, visible=True)
            return
        rate = f"{record.tokens / record.seconds if record.seconds else 0.0:,.0f}"
        if self.console.is_terminal:
            loss = f"{record.loss:.4f}{' (skipped)' if record.skipped else ''}"
            self._bar.update(self._task, completed=step, total=total, loss=loss, rate=rate)
        elif step == total or step % max(1, total // _LINES) == 0:
            skipped = " (skipped: overflow)" if record.skipped else ""
            self.console.print(
                f"step {step}/{total}  loss {record.loss:.4f}{skipped}  {rate} tokens/s", highlight=False
            )


def _handlers_on(stream: TextIO) -> list[logging.StreamHandler[TextIO]]:
    """The log handlers that write to `stream`.

    While a live bar is shown rich puts a stream of its own in the place of `sys.stderr`, so that what is written goes
    above the bar. A handler that took `sys.stderr` earlier, as transformers' does, would write into the bar.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return [
        handler
        for logger in loggers
        if isinstance(
            logger, logging.Logger
        )  # the others hold the place of a parent that nobody has asked for
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
        # logging's own last resort has no stream of its own: it asks for sys.stderr each time
        and vars(handler).get("stream") is stream
    ]
