"""Commands as they are printed: what is pasted into a shell is what was printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from isotype.core.terminal import as_typed

_INDENT = 4
"""Columns by which the second line of a command stands further in than its first."""


def printed_command(tokens: Sequence[str], width: int | None = None, indent: int = 0) -> str:
    """A command quoted for a shell, on lines of its own.

    Args:
        tokens: the program and its arguments, unquoted.
        width: columns that a line may take; a longer command goes on after ` \\` at the end of a line, and only an argument
            that is longer by itself takes more. None: one line, as for a file or a pipe.
        indent: columns that stay free on the left.
    """
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
    """The arguments, each flag with its values where they are no longer than `room`."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(word)
    for group in groups:
        whole = " ".join(group)
        yield from [whole] if len(whole) <= room else group
