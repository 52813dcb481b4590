"""Consoles for text without markup and with escaped control characters, and a progress bar."""

import logging
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from isotype.compat.replaced import replace
from isotype.core.terminal import shown

if TYPE_CHECKING:
    from rich.progress import Progress


_Item = TypeVar("_Item")

LOG_WIDTH = 110
"""Width of a log file in columns. With rich's default of 80 columns, every table would be wrapped."""


class TerminalConsole(Console):
    """A rich console that parses no markup and no emoji codes, and escapes control characters (`\\x1b`)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})
        if not self.is_terminal and "width" not in options and "COLUMNS" not in os.environ:
            self.width = LOG_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield rich's segments with control characters escaped in their text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else shown(text), style, control)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as rich text with control characters escaped. rich also measures table cells by this text."""
        return super().render_str(shown(text), **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """Return rich's status line. Its text is not parsed as markup."""
        return super().status(Text(status) if isinstance(status, str) else status, **options)


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802 - its name in the standard library
        return shown(super().getMessage())


@contextmanager
def libraries_shown() -> Iterator[None]:
    """In the `with` block, escape control characters in log messages and warnings of libraries."""
    format_warning = warnings.formatwarning
    with ExitStack() as after:
        after.callback(logging.setLogRecordFactory, logging.getLogRecordFactory())
        logging.setLogRecordFactory(_Record)
        after.callback(replace(warnings, "formatwarning", lambda *a, **o: shown(format_warning(*a, **o))))
        yield


_AFTER = 3.0
"""Seconds before a progress bar appears."""


class Bar:
    """A progress bar for `total` items. The bar appears on standard error after three seconds, and only in a terminal."""

    def __init__(self, text: str, shown: bool = True) -> None:
        self._console = TerminalConsole(stderr=True)
        self._shown = shown and self._console.is_terminal
        self._text, self.total, self._done = text, 0, 0
        self._started = time.monotonic()
        self._progress: Progress | None = None

    def advance(self) -> None:
        self._done += 1
        if not self._shown:
            return
        if self._progress is None and time.monotonic() - self._started > _AFTER:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
        if self._progress is not None:
            self._progress.stop()


def with_bar(items: Iterable[_Item], text: str, total: int, shown: bool = True) -> Iterator[_Item]:
    """Yield the items with a progress bar. The bar counts an item when the next item is requested."""
    with closing(Bar(text, shown)) as bar:
        bar.total = total
        for item in items:
            yield item
            bar.advance()
