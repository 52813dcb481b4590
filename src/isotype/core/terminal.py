"""Terminals and log files: those that take ASCII only get the nearest ASCII, those that take nothing more get nothing more."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

_NEAREST = {
    "×": "x", "…": "...", "→": "->", "←": "<-", "·": "*", "−": "-", "–": "-", "—": "-", "∞": "inf", "✓": "ok", "✕": "x",
    "≤": "<=", "≥": ">=", "≈": "~", "±": "+-", "’": "'", "“": '"', "”": '"', "│": "|", "↵": "\\n", "•": "*", "µ": "u", "─": "-", "▏": "|", "█": "#",
}  # fmt: skip
# C0 and C1 but for tabs and ends of lines; separators of lines, marks and overrides of direction.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_UNDECODED = re.compile("[\udc80-\udcff]")
_HANDLER = "isotype.nearest"


class _Lasting:
    """Standard output or error of this process, silent once it can no longer be written: a full disk, a reader or terminal that has gone.

    Attributes:
        raises: the first failure is raised: a command whose result is its output has failed by it.
        lost: why nothing is written any more; None while it is.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.raises = stream, True
        self.lost: str | None = None

    def write(self, text: str) -> int:
        self._kept(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._kept(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _kept(self, call: Callable[..., object], *arguments: str) -> None:
        try:
            call(*arguments)
        except BlockingIOError:
            pass  # a terminal in non-blocking mode that is busy: this text is lost, the next may not be
        except OSError as error:
            # What else writes there (children, code in C), and what is still in the stream's buffer, goes nowhere, too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self.lost = error.strerror or type(error).__name__
            if self.raises:
                raise


def outlive_output(raises: bool) -> None:
    """Let standard output and error of this process go silent where they can no longer be written.

    Streams that something else has put in their place (a notebook, a test) stay as they are.

    Args:
        raises: the first failure is raised all the same.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream = _Lasting(stream)
            setattr(sys, name, stream)
        if isinstance(stream, _Lasting):
            stream.raises = raises


def lost_output() -> tuple[str, ...]:
    """A sentence for each of standard output and error that could not be written to its end."""
    streams = {"standard output": sys.stdout, "standard error": sys.stderr}
    lost = {title: getattr(stream, "lost", None) for title, stream in streams.items()}
    return tuple(f"{title} could not be written: {why}" for title, why in lost.items() if why)


def print_the_nearest() -> None:
    """Let standard output and error print what their encoding lacks as the nearest that it has, else as `?`.

    UTF-8 lacks the bytes of file names that are not UTF-8. Standard input keeps bytes that are not in its encoding, for
    `as_typed` to read.
    """
    codecs.register_error(_HANDLER, _nearest)
    for stream, errors in ((sys.stdout, _HANDLER), (sys.stderr, _HANDLER), (sys.stdin, "surrogateescape")):
        # A stream that somebody has put in its place (a notebook, a test) prints as it likes.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)


def shown(text: str) -> str:
    """Text whose control characters are written out, `\\x1b`: of names in files, a terminal would obey them."""
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda each: each[0].encode("unicode_escape").decode(), text)


def as_typed(text: str) -> str:
    """Text that may hold an argument or a line of standard input which the locale could not decode: it is UTF-8."""
    if not _UNDECODED.search(text):
        return text
    return text.encode(sys.getfilesystemencoding(), "surrogateescape").decode("utf-8", "replace")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking, end = error.object[error.start : error.end], error.end
    text = "".join(
        _NEAREST.get(each, "." if "\u2800" <= each <= "\u28ff" else "?") for each in lacking
    )  # spinners
    text = text.encode(error.encoding, "replace").decode(error.encoding)
    # In a table the longer text takes its room from the gap before the next column.
    gap = len(error.object) - end - len(error.object[end:].lstrip(" "))
    return text, end + max(0, min(len(text) - len(lacking), gap - 1))
