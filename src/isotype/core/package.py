"""The package's version and its folder, whose frames are left out of messages."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.2.0"
PACKAGE = Path(__file__).parents[1]
