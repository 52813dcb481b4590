"""torch's private GPU operators of RMSNorm. The weight must have the input's dtype. `offset` is not supported."""

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `lora.gpu.elementwise.rms_norm`, by a kernel of torch from 2.9 on (layer_norm_kernel.cu)."""
    y, inverse = torch.ops.aten._fused_rms_norm(x, list(weight.shape), weight, eps)
    return y, inverse


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, offset: float = 0.0
) -> torch.Tensor:
    """Return the gradient of x. `grad` is the gradient of the norm's result."""
    d_x: torch.Tensor
    d_x, _ = torch.ops.aten._fused_rms_norm_backward(
        grad, x, list(weight.shape), inverse, weight, [True, False]
    )
    return d_x
