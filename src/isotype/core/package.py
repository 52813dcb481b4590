"""This package: its version, and where it lies on disk (its own frames are left out of what a user is shown)."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).parents[1]
