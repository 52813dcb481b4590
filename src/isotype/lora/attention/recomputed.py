"""Attention that saves only q, k and v, and is recomputed in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Beside = Callable[..., object]


def recomputed(
    compute: Compute, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beside: Beside = lambda *_: None
) -> torch.Tensor:
    """Return `compute(q, k, v)`, and save only these three for the backward.

    `beside` gets the tensors that are read and written; its result is alive as long as they are.
    """
    out: torch.Tensor = _Recomputed.apply(q, k, v, compute, beside)  # type: ignore[no-untyped-call]
    return out


def float32_copies(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return empty float32 tensors in the shapes of `tensors`: the copies that a kernel works on."""
    return [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in tensors]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, compute: Compute, beside: Beside
    ) -> torch.Tensor:
        ctx.compute, ctx.beside = compute, beside
        ctx.save_for_backward(q, k, v)
        _alive = beside(q, k, v)
        return compute(q, k, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        q, k, v = (x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True))
        _alive = ctx.beside(d_out, q, k, v, q, k, v)  # the operands and the gradients
        with torch.enable_grad():
            out = ctx.compute(q, k, v)
        grads = iter(torch.autograd.grad(out, [x for x in (q, k, v) if x.requires_grad], d_out))
        return *(next(grads) if need else None for need in needed), None, None
