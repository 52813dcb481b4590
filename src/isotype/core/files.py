"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from isotype.core.terminal import as_typed


def write_whole(path: Path, text: str) -> Path:
    """Write a text under a temporary name, then move it into place: a reader sees the former file or the new one.

    Raises:
        OSError: it cannot be written; a former file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(as_typed(text), encoding="utf-8", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
