"""torch's own fused operators, with the signatures of `isotype.lora.gpu.elementwise`."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `isotype.lora.gpu.elementwise.rms_norm`, of a weight in x's dtype and without an offset.

    float32 inside, rounded once (aten/src/ATen/native/cuda/layer_norm_kernel.cu, torch 2.9 and later). With a weight in another dtype
    torch warns and computes by single operators.
    """
    y, inverse = torch.ops.aten._fused_rms_norm(x, list(weight.shape), weight, eps)
    return y, inverse


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, offset: float = 0.0
) -> torch.Tensor:
    """As `isotype.lora.gpu.elementwise.rms_norm_backward`."""
    d_x: torch.Tensor
    d_x, _ = torch.ops.aten._fused_rms_norm_backward(
        grad, x, list(weight.shape), inverse, weight, [True, False]
    )
    return d_x
