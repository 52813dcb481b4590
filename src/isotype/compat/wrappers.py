"""Parts of module names that other libraries' wrappers insert before a module's name. This file imports no library."""

from __future__ import annotations

from typing import Final

ORIGINAL: Final = "_orig_mod"
"""Attribute of `torch.compile(module)` that holds `module`."""
BETWEEN: Final = frozenset(
    {"base_layer", "original_module", ORIGINAL, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""Parts of module names that PEFT, FSDP, torch.compile and activation checkpointing add."""
