"""Calls torch's GPU operators for RMSNorm, and for float32 products of 16-bit matrices.

`torch.mm(…, out_dtype=torch.float32)` calls `aten::mm.dtype`, and `torch.addmm` calls `aten::addmm.dtype` (see
`_mm_dtype_out_cuda` in aten/src/ATen/native/cuda/Blas.cpp). cuBLAS multiplies bfloat16 from compute capability 8.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Products:
    """Products by `addmm` if `scales` is True, else by `mm`: in some torch releases `addmm` cannot add to a float32 sum."""

    scales: bool

    def write(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, factor: float = 1.0) -> None:
        """Write factor · left @ right, a product of 16-bit matrices, into the float32 `out`."""
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
    """Return what `isotype.lora.gpu.elementwise.rms_norm` returns. The weight must have x's dtype, and no offset.

    The norm is computed in float32 and rounded once (aten/src/ATen/native/cuda/layer_norm_kernel.cu, torch 2.9 and
    later).
    """
    y, inverse = torch.ops.aten._fused_rms_norm(x, list(weight.shape), weight, eps)
    return y, inverse


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, offset: float = 0.0
) -> torch.Tensor:
    d_x: torch.Tensor
    d_x, _ = torch.ops.aten._fused_rms_norm_backward(
        grad, x, list(weight.shape), inverse, weight, [True, False]
    )
    return d_x
