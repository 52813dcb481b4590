"""Names that wrappers of other libraries put between a module and its parent; no imports."""

from __future__ import annotations

from typing import Final

ORIGINAL: Final = "_orig_mod"
"""Of `torch.compile(module)`."""
BETWEEN: Final = frozenset(
    {"base_layer", "original_module", ORIGINAL, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""Name parts added by PEFT, DDP, FSDP, torch.compile and checkpointing."""
