"""Output to terminals and log files: encodings, control characters, broken streams, and commands for a shell."""

import codecs
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

_NEAREST = {
    "×": "x", "…": "...", "→": "->", "←": "<-", "·": "*", "−": "-", "–": "-", "—": "-", "∞": "inf", "✓": "ok", "✕": "x", "◐": "~",
    "≤": "<=", "≥": ">=", "≈": "~", "±": "+-", "’": "'", "“": '"', "”": '"', "│": "|", "↵": "\\n", "•": "*", "µ": "u", "─": "-", "▏": "|", "█": "#",
}  # fmt: skip
# Control codes C0 and C1 without tabs and newlines, line separators, bidirectional marks and overrides.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_UNDECODED = re.compile("[\udc80-\udcff]")
_HANDLER = "isotype.nearest"


class _Lasting:
    """Standard output or error. After a failure (a full disk, a closed pipe or terminal), it ignores writes.

    Attributes:
        raises: True if the first failed write raises an error.
        lost: the reason why writing stopped, or None.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.raises = stream, True
        self.lost: str | None = None

    def write(self, text: str) -> int:
        self._guarded(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _guarded(self, call: Callable[..., object], *arguments: str) -> None:
        try:
            call(*arguments)
        except BlockingIOError:
            pass  # a terminal in non-blocking mode is busy: only this text is lost
        except OSError as error:
            # The descriptor is redirected, so that writes of child processes and C code do not fail.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self.lost = error.strerror or type(error).__name__
            if self.raises:
                raise


def outlive_output(raises: bool) -> None:
    """Let the process continue if standard output or standard error can no longer be written.

    If `raises` is True, the first failed write raises an error. Streams of a notebook or a test are not changed.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream = _Lasting(stream)
            setattr(sys, name, stream)
        if isinstance(stream, _Lasting):
            stream.raises = raises


def lost_output() -> tuple[str, ...]:
    """Return a sentence for each of standard output and standard error that could not be written."""
    streams = {"standard output": sys.stdout, "standard error": sys.stderr}
    lost = {title: getattr(stream, "lost", None) for title, stream in streams.items()}
    return tuple(f"{title} could not be written: {why}" for title, why in lost.items() if why)


def print_the_nearest() -> None:
    """If standard output or standard error cannot encode a character, replace the character by a similar character or
    `?`.

    Let standard input keep bytes that are not UTF-8 as surrogates, as Python does for file names. See `as_typed`.
    """
    codecs.register_error(_HANDLER, _nearest)
    for stream, errors in ((sys.stdout, _HANDLER), (sys.stderr, _HANDLER), (sys.stdin, "surrogateescape")):
        # A stream of a notebook or a test may have no such method.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)


def shown(text: str) -> str:
    """Escape control characters (`\\x1b`) in a text, because a name from a file could otherwise control the terminal."""
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def as_typed(text: str) -> str:
    """Decode surrogates in `text` as UTF-8. Python represents bytes that it could not decode by surrogates."""
    if not _UNDECODED.search(text):
        return text
    return text.encode(sys.getfilesystemencoding(), "surrogateescape").decode("utf-8", "replace")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking, end = error.object[error.start : error.end], error.end
    # Braille characters are frames of rich's spinner.
    text = "".join(_NEAREST.get(char, "." if "\u2800" <= char <= "\u28ff" else "?") for char in lacking)
    text = text.encode(error.encoding, "replace").decode(error.encoding)
    # In a table, a longer text may fill the gap before the next column.
    gap = len(error.object) - end - len(error.object[end:].lstrip(" "))
    return text, end + max(0, min(len(text) - len(lacking), gap - 1))


_INDENT = 4  # spaces before the continuation lines of a command


def printed_command(tokens: Sequence[str], width: int | None = None, indent: int = 0) -> str:
    """Return a command quoted for a shell. Lines longer than `width` columns go on after ` \\`."""
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
    """Yield the parts of a command: each flag with its values, or each word if both are longer than `room`."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(word)
    for group in groups:
        whole = " ".join(group)
        yield from [whole] if len(whole) <= room else group
