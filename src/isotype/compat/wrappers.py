"""Parts that wrappers of other libraries put into module names. This file imports no library."""

from typing import Final

ORIGINAL: Final = "_orig_mod"
"""Attribute of `torch.compile(module)` that holds `module`."""
FSDP1: Final = "_fsdp_wrapped_module"
WRAPPERS: Final = frozenset({ORIGINAL, "_orig_module", FSDP1, "_checkpoint_wrapped_module"})
"""Parts of module names by torch.compile, torch_xla, FSDP and activation checkpointing."""
BETWEEN: Final = WRAPPERS | {"base_layer", "original_module"}
"""`WRAPPERS`, and the parts that PEFT adds."""
