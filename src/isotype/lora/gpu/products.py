"""torch's own operators: RMSNorm, and products of 16-bit matrices that are summed in float32 and not rounded to 16 bits after.

`aten::mm.dtype` and `aten::addmm.dtype` (`torch.mm(…, out_dtype=torch.float32)`; `_mm_dtype_out_cuda` in aten/src/ATen/native/cuda/Blas.cpp).
cuBLAS has products of bfloat16 from compute capability 8.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Products:
    """One way to form them.

    Attributes:
        scales: whether `addmm` takes a float32 sum beside 16-bit factors: it multiplies and adds as it writes. Some releases of torch want
            the sum in the factors' dtype.
    """

    scales: bool

    def write(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, factor: float = 1.0) -> None:
        """Write factor · left @ right into the float32 `out`; `left` `[rows, depth]`, `right` `[depth, columns]` of one 16-bit dtype."""
        if self.scales and factor != 1:
            torch.addmm(out, left, right, out_dtype=out.dtype, beta=0, alpha=factor, out=out)
            return
        torch.mm(left, right, out_dtype=out.dtype, out=out)
        if factor != 1:
            out.mul_(factor)

    def add(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, factor: float = 1.0) -> None:
        """Add factor · left @ right to the float32 `out`."""
        if self.scales:
            torch.addmm(out, left, right, out_dtype=out.dtype, alpha=factor, out=out)
        else:
            out.add_(torch.mm(left, right, out_dtype=out.dtype), alpha=factor)


ADDMM, MM = Products(scales=True), Products(scales=False)


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
