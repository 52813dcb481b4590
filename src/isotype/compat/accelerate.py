"""accelerate (1.13 to 1.15): its marks on models and optimizers, without importing it."""

from __future__ import annotations

import sys
from typing import Any, Final

HOOK: Final = "_hf_hook"
"""Attribute of a module with the hook that fetches its weights."""
FORWARD_BEFORE: Final = "_old_forward"
"""Attribute of a module with the forward that the hook calls."""


def mark_as_skipped(optimizer: Any) -> None:
    """Mark a step as skipped, so that accelerate does not advance the learning rate schedule."""
    optimizer._is_overflow = True


def is_prepared(model: Any) -> bool:
    """Return whether accelerate has wrapped a model's forward in its autocast."""
    return hasattr(model, "_original_forward")


def mixed_precision() -> str:
    """Return this process's mixed precision: `fp16`, `bf16`, `no`, the text "None" if unset, "" without accelerate."""
    state = sys.modules.get("accelerate.state")
    return "" if state is None else str(state.AcceleratorState._shared_state.get("_mixed_precision"))


def only_places(hook: Any) -> bool:
    """Return whether a hook does not move inputs already on the weights' device, as those of a device map."""
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload and not hook.io_same_device
