"""Dropout of the input of an adapter, which keeps a mask of booleans and no second X.

On GPUs it is the kernel of `nn.Dropout`, which draws the mask and multiplies by it at once, and its backward, which multiplies again.
"""

from __future__ import annotations

import torch

from isotype.compat.torch import has_kernel
from isotype.lora import kernels

_aten = torch.ops.aten


def drop(
    x: torch.Tensor, source: torch.Tensor, probability: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(what dropout leaves of X, scaled up; the mask `[rows, in]`, None where it drops nothing).

    Random numbers of a CPU are drawn in the order of memory: in that of the input that was given, a transposed one say, they are the
    numbers that `nn.Dropout` draws.

    Args:
        x: X as a matrix `[rows, in]` in the dtype of the products.
        source: the tensor that X was flattened from, of any shape and strides.
        probability: with which a number is dropped.
    """
    if not probability:
        return x, None
    if _has_kernel(x):
        kept, mask = _aten.native_dropout(x, probability, True)
        return kept, mask
    drawn = torch.empty_like(source, dtype=torch.bool).bernoulli_(1 - probability)
    mask = drawn.reshape(-1, source.shape[-1])
    return dropped(x, mask, probability), mask


def dropped(x: torch.Tensor, mask: torch.Tensor | None, probability: float) -> torch.Tensor:
    """X without what the mask leaves out, scaled up; also of a gradient."""
    if mask is None:
        return x
    # A probability of 1 leaves nothing, and nothing to scale up.
    scale = 1 / max(1 - probability, torch.finfo(x.dtype).tiny)
    if _has_kernel(x):
        result: torch.Tensor = _aten.native_dropout_backward(x, mask, scale if probability < 1 else 0.0)
        return result
    return x * mask * scale


def _has_kernel(x: torch.Tensor) -> bool:
    return x.device.type in kernels.DEVICES and has_kernel("aten::native_dropout", x.device.type)
