"""Terminals and log files that take ASCII only: they get the nearest ASCII, and what is typed is read as UTF-8."""

from __future__ import annotations

import codecs
import re
import shlex
import sys
from collections.abc import Sequence

_NEAREST = {
    "×": "x", "…": "...", "→": "->", "←": "<-", "·": "*", "−": "-", "–": "-", "—": "-", "∞": "inf", "✓": "ok", "✕": "x",
    "≤": "<=", "≥": ">=", "≈": "~", "±": "+-", "’": "'", "“": '"', "”": '"', "│": "|", "↵": "\\n", "•": "*", "µ": "u", "─": "-", "▏": "|", "█": "#",
}  # fmt: skip
_UNDECODED = re.compile("[\udc80-\udcff]")
_HANDLER = "isotype.nearest"


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


def command_line(argv: Sequence[str]) -> str:
    """`isotype …` as it can be pasted into a shell."""
    return as_typed(shlex.join(["isotype", *argv]))
