"""accelerate (1.13 to 1.15): attributes that it sets on models and optimizers. This file does not import accelerate."""

import sys
from typing import Any, Final

HOOK: Final = "_hf_hook"
"""Module attribute with accelerate's hook, which moves weights or inputs to a device."""
PREPARED: Final = "_is_accelerate_prepared"
"""Attribute that is true for results of `accelerator.prepare`, and that `unwrap_model` does not remove."""
FORWARD_BEFORE: Final = "_old_forward"
"""Module attribute with the original forward, which accelerate's hook calls."""


def mark_as_skipped(optimizer: Any) -> None:
    """Mark the optimizer step as skipped, so that accelerate does not advance the learning rate schedule."""
    optimizer._is_overflow = True


def is_prepared(model: Any) -> bool:
    """Return whether accelerate's autocast wraps a model's forward."""
    return hasattr(model, "_original_forward")


def mixed_precision() -> str:
    """Return accelerate's mixed precision: `fp16`, `bf16`, `no`, or "None" if unset; "" if accelerate is not imported."""
    state = sys.modules.get("accelerate.state")
    return "" if state is None else str(state.AcceleratorState._shared_state.get("_mixed_precision"))


def only_places(hook: Any) -> bool:
    """Return whether a hook only moves inputs to the weights' device, like the hooks of a device map."""
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload and not hook.io_same_device
