"""Terminals and log files that take ASCII only get the nearest ASCII, not an exception."""

from __future__ import annotations

import codecs
import sys

_NEAREST = {
    "×": "x", "…": "...", "→": "->", "←": "<-", "·": "*", "−": "-", "–": "-", "—": "-", "∞": "inf", "✓": "ok", "✕": "x",
    "≤": "<=", "≥": ">=", "≈": "~", "±": "+-", "’": "'", "“": '"', "”": '"', "│": "|", "─": "-", "▏": "|", "█": "#",
}  # fmt: skip
_HANDLER = "isotype.nearest"


def print_the_nearest() -> None:
    """Let standard output and error print what their encoding lacks as the nearest that it has, else as `?`."""
    codecs.register_error(_HANDLER, _nearest)
    for stream in (sys.stdout, sys.stderr):
        # A stream that somebody has put in its place (a notebook, a test) prints as it likes.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and codecs.lookup(stream.encoding).name != "utf-8":
            reconfigure(errors=_HANDLER)


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    text = "".join(_NEAREST.get(character, "?") for character in lacking)
    return text if error.encoding.lower() in ("ascii", "us-ascii") else text.encode(
        error.encoding, "replace"
    ).decode(error.encoding), error.end
