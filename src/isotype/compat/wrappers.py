"""Names that other libraries' wrappers put between a module and its parent; nothing is imported for them."""

from __future__ import annotations

from typing import Final

ORIGINAL: Final = "_orig_mod"
"""Of `torch.compile(module)`."""
BETWEEN: Final = frozenset(
    {"base_layer", "original_module", ORIGINAL, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""Parts of a name that PEFT, DDP, FSDP, torch.compile and checkpointing add."""
