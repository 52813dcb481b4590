"""Cache folders of tests that want one of their own."""

from __future__ import annotations

import contextlib
from pathlib import Path

from isotype.core.cache import LIBRARIES, default_cache_dir


def own_cache(folder: Path) -> str:
    """`folder` as a cache that keeps nothing yet but the libraries of this machine, whose compilation takes half a minute."""
    libraries = default_cache_dir() / LIBRARIES
    libraries.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # two workers share a folder
        (folder / LIBRARIES).symlink_to(libraries.resolve())
    return str(folder)
