"""accelerate (1.13 to 1.15): what it leaves on models and optimizers. It is not imported."""

from __future__ import annotations

import sys
from typing import Any, Final

HOOK: Final = "_hf_hook"
"""Where a module keeps the hook that fetches its weights."""
FORWARD_BEFORE: Final = "_old_forward"
"""Where a module keeps the forward that the hook calls."""


def mark_as_skipped(optimizer: Any) -> None:
    """Tell accelerate that the step was skipped, so that the learning rate schedule waits."""
    optimizer._is_overflow = True


def is_prepared(model: Any) -> bool:
    """Whether accelerate has put its autocast around a model's forward."""
    return hasattr(model, "_original_forward")


def mixed_precision() -> str:
    """The mixed precision that this process was set up with (`fp16`, `bf16`, `no`); "None" before, "" without accelerate."""
    state = sys.modules.get("accelerate.state")
    return "" if state is None else str(state.AcceleratorState._shared_state.get("_mixed_precision"))


def only_places(hook: Any) -> bool:
    """True if a hook of accelerate's leaves an input on the weights' device as it is, as one of a device map does."""
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload and not hook.io_same_device
