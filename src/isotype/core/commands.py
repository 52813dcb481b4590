"""Shell-quoted commands for printing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from isotype.core.terminal import as_typed

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
