"""Attention in which no query reads a key: no rows, no queries, no keys, or a mask that closes everything."""

from __future__ import annotations

from typing import Any

import torch


def attention_to_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Zeros `[batch, query heads, queries, value head]`, with gradients of zero, as torch's kernel has it.

    A transposed view of contiguous `[batch, queries, query heads, value head]`.
    """
    out: torch.Tensor = _Nothing.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        batch, heads, queries, _ = q.shape
        return q.new_zeros(batch, queries, heads, v.shape[3]).transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(x) if need else None for x, need in needed)
