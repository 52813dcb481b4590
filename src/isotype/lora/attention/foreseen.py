"""Attention by isotype's kernels as a trace sees it: torch's operator, and the memory that the kernels take where a CPU emulates the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def foreseen(compute: Compute, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`compute` of q, k and v, which alone are kept for the backward; beside it lie the float32 copies that the kernels read and write."""
    out: torch.Tensor = _Foreseen.apply(q, k, v, compute)  # type: ignore[no-untyped-call]
    return out


class _Foreseen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        ctx.compute = compute
        ctx.save_for_backward(q, k, v)
        _copies = _float32_of(q, k, v)
        return compute(q, k, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        q, k, v = (x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True))
        _copies = _float32_of(d_out, q, k, v, q, k, v)  # the operands, and the gradients
        with torch.enable_grad():
            out = ctx.compute(q, k, v)
        grads = iter(torch.autograd.grad(out, [x for x in (q, k, v) if x.requires_grad], d_out))
        return *(next(grads) if need else None for need in needed), None


def _float32_of(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in tensors]
