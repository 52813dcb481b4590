"""Dropout of the input of a LoRA layer, with a mask that serves forward and backward."""

from __future__ import annotations

import torch


def mask_of(probability: float, x: torch.Tensor) -> torch.Tensor | None:
    """What dropout leaves of X, as booleans `[rows, in]`; None where it drops nothing.

    Random numbers are drawn in the order of memory: in that of the input that was given, a transposed one say, they are the
    numbers that `nn.Dropout` draws.
    """
    if not probability:
        return None
    drawn = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - probability)
    return drawn.reshape(-1, x.shape[-1])


def dropped(x: torch.Tensor, mask: torch.Tensor | None, probability: float) -> torch.Tensor:
    """X without what the mask leaves out, scaled up; also of a gradient."""
    # A probability of 1 leaves nothing, and nothing to scale up.
    return x if mask is None else x * mask * (1 / max(1 - probability, torch.finfo(x.dtype).tiny))
