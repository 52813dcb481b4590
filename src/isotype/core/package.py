"""Where this package lies on disk: its own frames are left out of what a user is shown."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
