"""Where isotype keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Where isotype keeps what it can make again: `$ISOTYPE_CACHE`, `$XDG_CACHE_HOME/isotype` or `~/.cache/isotype`."""
    if own := os.environ.get("ISOTYPE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "isotype"
