"""Nothing half-written: build aside, bring it to the disk, rename into place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def fsync_tree(directory: Path) -> None:
    """Bring every file below `directory`, and the names themselves, to the disk."""
    for root, _, files in os.walk(directory):
        for name in files:
            _fsync(Path(root) / name)
        _fsync(Path(root))


def publish_directory(built: Path, final: Path) -> None:
    """Rename `built` to `final`; an older `final` is set aside first and removed afterwards."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    built.rename(final)
    _fsync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def publish_files(built: Path, final: Path) -> None:
    """Rename every file below `built` over the one of the same name below `final`."""
    for source in sorted(built.rglob("*")):
        target = final / source.relative_to(built)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
    _fsync(final)


def _fsync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle on a directory to bring to the disk
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
