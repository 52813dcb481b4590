"""Output for terminals and log files with limited encodings, and output that can be lost."""

from __future__ import annotations

import codecs
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

_NEAREST = {
    "×": "x", "…": "...", "→": "->", "←": "<-", "·": "*", "−": "-", "–": "-", "—": "-", "∞": "inf", "✓": "ok", "✕": "x",
    "≤": "<=", "≥": ">=", "≈": "~", "±": "+-", "’": "'", "“": '"', "”": '"', "│": "|", "↵": "\\n", "•": "*", "µ": "u", "─": "-", "▏": "|", "█": "#",
}  # fmt: skip
# C0 and C1 except tabs and newlines; line separators, and bidirectional marks and overrides.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_UNDECODED = re.compile("[\udc80-\udcff]")
_HANDLER = "isotype.nearest"


class _Lasting:
    """Standard output or error that stops writing after a failure: a full disk, a closed pipe or terminal.

    Attributes:
        raises: whether the first failure is raised, for commands whose result is their output.
        lost: why writing stopped; None if it did not.
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
            pass  # a busy terminal in non-blocking mode: this text is lost, the next may not be
        except OSError as error:
            # Other writers (children, C code) and the stream's buffer are redirected to nowhere too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self.lost = error.strerror or type(error).__name__
            if self.raises:
                raise


def outlive_output(raises: bool) -> None:
    """Keep the process running if standard output or error can no longer be written; `raises`: raise the
    first failure.

    Streams that were replaced (by a notebook or a test) are unchanged.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream = _Lasting(stream)
            setattr(sys, name, stream)
        if isinstance(stream, _Lasting):
            stream.raises = raises


def lost_output() -> tuple[str, ...]:
    """Return a sentence for each of standard output and error that lost text."""
    streams = {"standard output": sys.stdout, "standard error": sys.stderr}
    lost = {title: getattr(stream, "lost", None) for title, stream in streams.items()}
    return tuple(f"{title} could not be written: {why}" for title, why in lost.items() if why)


def print_the_nearest() -> None:
    """Print characters that the encoding lacks as the nearest ones available, else `?`.

    UTF-8 lacks the bytes of non-UTF-8 file names. Standard input keeps undecodable bytes, which `as_typed`
    decodes.
    """
    codecs.register_error(_HANDLER, _nearest)
    for stream, errors in ((sys.stdout, _HANDLER), (sys.stderr, _HANDLER), (sys.stdin, "surrogateescape")):
        # A replaced stream (a notebook, a test) keeps its settings.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)


def shown(text: str) -> str:
    """Escape control characters (`\\x1b`): in names from files they would control the terminal."""
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda each: each[0].encode("unicode_escape").decode(), text)


def as_typed(text: str) -> str:
    """Decode the undecoded bytes of an argument or a line of standard input as UTF-8."""
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


_INDENT = 4
"""Columns by which continuation lines of a command are indented."""


def printed_command(tokens: Sequence[str], width: int | None = None, indent: int = 0) -> str:
    """Return a command quoted for a shell; lines longer than `width` columns continue after ` \\`."""
    words = [as_typed(shlex.quote(token)) for token in tokens]
    line = " " * indent + " ".join(words)
    if width is None or len(line) <= width:
        return line
    lines = [" " * indent + words[0]]
    room = width - len(" \\")
    for part in _parts(words[1:], room - indent - _INDENT):
        if len(lines[-1]) + 1 + len(part) <= room:
            lines[-1] += f" {part}"
        else:
            lines.append(" " * (indent + _INDENT) + part)
    return " \\\n".join(lines)


def _parts(words: Sequence[str], room: int) -> Iterator[str]:
    """Yield the arguments; a flag and its values stay together if they fit into `room`."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(word)
    for group in groups:
        whole = " ".join(group)
        yield from [whole] if len(whole) <= room else group
