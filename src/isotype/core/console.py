"""The one door to the terminal: what files name is shown as text, and neither moves the cursor nor chooses colours."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from isotype.core.terminal import shown


class TerminalConsole(Console):
    """A console that reads no markup and no emoji out of text, and shows control characters as `\\x1b`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does, each piece of text with its control characters shown."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else shown(text), style, control)

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich does: the cells of a table are measured by it."""
        return super().render_str(shown(text), **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """As rich does; of a text it would read markup."""
        return super().status(Text(status) if isinstance(status, str) else status, **options)


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802 - its name in the standard library
        return shown(super().getMessage())


@contextmanager
def libraries_shown() -> Iterator[None]:
    """Within it what libraries log and warn of has its control characters shown, too."""
    record, format_warning = logging.getLogRecordFactory(), warnings.formatwarning
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = lambda *args, **options: shown(format_warning(*args, **options))
    try:
        yield
    finally:
        logging.setLogRecordFactory(record)
        warnings.formatwarning = format_warning
