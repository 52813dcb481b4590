"""torch's GPU operators for RMSNorm, which have private names. The weight must have the input's dtype, and no offset."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `isotype.lora.gpu.elementwise.rms_norm` returns.

    The norm is computed in float32 and rounded once (aten/src/ATen/native/cuda/layer_norm_kernel.cu, torch 2.9 and
    later).
    """
    y, inverse = torch.ops.aten._fused_rms_norm(x, list(weight.shape), weight, eps)
    return y, inverse


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, offset: float = 0.0
) -> torch.Tensor:
    """Return the gradient of x for the gradient of the norm's result."""
    d_x: torch.Tensor
    d_x, _ = torch.ops.aten._fused_rms_norm_backward(
        grad, x, list(weight.shape), inverse, weight, [True, False]
    )
    return d_x
