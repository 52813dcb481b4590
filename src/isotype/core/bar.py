"""A progress bar for slow work in a terminal."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isotype.core.console import TerminalConsole

_AFTER = 3.0
"""Seconds before the bar appears."""


class Bar:
    """Progress bar of `total` steps on standard error, shown after three seconds if that is a terminal."""

    def __init__(self, text: str, shown: bool = True) -> None:
        self._console = TerminalConsole(stderr=True)
        self._shown = shown and self._console.is_terminal
        self._text, self.total, self._done = text, 0, 0
        self._started = time.monotonic()
        self._progress: Progress | None = None

    def advance(self) -> None:
        """Count one finished item."""
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
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
