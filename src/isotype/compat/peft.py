"""PEFT (0.21): what it leaves on its layers. It is not imported."""

from __future__ import annotations

from typing import Final

DORA_CACHE: Final = "_dora_cache"
"""Where a layer of DoRA keeps the norms that it has computed."""
