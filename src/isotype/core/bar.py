"""A progress bar that comes when something takes long, on a terminal."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isotype.core.console import TerminalConsole

_AFTER = 3.0
"""Seconds without a bar."""


class Bar:
    """Counts to `total`; shown on standard error from the third second on, where that is a terminal.

    Args:
        text: what is going on.
        shown: False never shows it.

    Attributes:
        total: how many times `advance` will be called.
    """

    def __init__(self, text: str, shown: bool = True) -> None:
        self._console = TerminalConsole(stderr=True)
        self._shown = shown and self._console.is_terminal
        self._text, self.total, self._done = text, 0, 0
        self._started = time.monotonic()
        self._progress: Progress | None = None

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        if not self._shown:
            return
        if self._progress is None and time.monotonic() - self._started > _AFTER:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(self._text, total=self.total)
            self._progress.start()
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._done)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
