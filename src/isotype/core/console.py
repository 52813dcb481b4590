"""Terminal output: text is printed literally, control characters in file contents are escaped."""

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
    """A console without markup and emoji, which shows control characters as `\\x1b`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with control characters in text escaped."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else shown(text), style, control)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string with control characters escaped; rich measures table cells with it."""
        return super().render_str(shown(text), **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """Show a status whose text is not parsed as markup."""
        return super().status(Text(status) if isinstance(status, str) else status, **options)


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802 - its name in the standard library
        return shown(super().getMessage())


@contextmanager
def libraries_shown() -> Iterator[None]:
    """Context manager that escapes control characters in logs and warnings of libraries."""
    record, format_warning = logging.getLogRecordFactory(), warnings.formatwarning
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = lambda *args, **options: shown(format_warning(*args, **options))
    try:
        yield
    finally:
        logging.setLogRecordFactory(record)
        warnings.formatwarning = format_warning
