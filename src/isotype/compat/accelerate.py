"""accelerate (1.13 to 1.15): the attributes that it sets on models and optimizers. This file does not import accelerate."""

from __future__ import annotations

import sys
from typing import Any, Final

HOOK: Final = "_hf_hook"
"""Attribute of a module that holds accelerate's hook, which moves the module's weights to the device."""
FORWARD_BEFORE: Final = "_old_forward"
"""Attribute of a module that holds the forward that accelerate's hook calls."""


def mark_as_skipped(optimizer: Any) -> None:
    """Mark the optimizer step as skipped, so that accelerate does not advance the learning rate schedule."""
    optimizer._is_overflow = True


def is_prepared(model: Any) -> bool:
    """Return whether accelerate has wrapped a model's forward in accelerate's autocast."""
    return hasattr(model, "_original_forward")


def mixed_precision() -> str:
    """Return accelerate's mixed precision in this process: `fp16`, `bf16`, `no` or "None"; "" if accelerate is not imported."""
    state = sys.modules.get("accelerate.state")
    return "" if state is None else str(state.AcceleratorState._shared_state.get("_mixed_precision"))


def only_places(hook: Any) -> bool:
    """Return whether a hook only moves inputs to the device on which the weights stay, as hooks of a device map do."""
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload and not hook.io_same_device
