"""torch: private parts of GradScaler, and of its variant for sharded models."""

from __future__ import annotations

from typing import Any

import torch


def loss_scale(scaler: Any) -> torch.Tensor | float | None:
    """Return a GradScaler's loss scale without synchronizing; None if `scaler` is None or disabled.

    The scale is a float32 tensor of shape `[]` on the GradScaler's device. Before the first backward, it is a number.
    """
    if scaler is None or not scaler.is_enabled():
        return None
    scale: torch.Tensor | None = scaler._scale
    return float(scaler.get_scale()) if scale is None else scale.reshape(())


def stored_scale(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """Return the tensor by which `scaler.scale` multiplies; None before its first call and for a disabled scaler."""
    return getattr(scaler, "_scale", None)


def sharded_scaler(device: str) -> torch.amp.GradScaler:
    """Return torch's GradScaler for sharded models, with overflow flags of shape `[]` in place of shape `[1]`.

    Fused optimizers reject the shape `[1]`: https://github.com/pytorch/pytorch/issues/140514
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    class Scaler(ShardedGradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            super().unscale_(optimizer)
            overflows = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            overflows.update({device: overflow.reshape(()) for device, overflow in overflows.items()})

    return Scaler(device)
