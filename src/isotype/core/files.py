"""Files that are whole or not there, after a power cut too."""

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
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(as_typed(text))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        bring_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def bring_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle on a directory to bring to the disk
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
