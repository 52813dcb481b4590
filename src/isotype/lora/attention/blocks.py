"""Calls torch's attention kernel for blocks of queries, each with only those keys to which the block attends.

Without a compiler, blocks make packed rows and windows faster, because torch's kernel alone would read masked keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from isotype.lora.attention.plan import LOG2_E, Block, Part, Spec, attention_to_nothing

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Beside = Callable[..., object]


def recomputed(
    compute: Compute, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beside: Beside = lambda *_: None
) -> torch.Tensor:
    """Return `compute(q, k, v)`. Only q, k and v are saved for the backward, which computes the result again.

    Before the forward and the backward, `beside` is called with the tensors that the pass reads and writes. Its result
    stays alive during the pass, so that a trace counts a kernel's temporary copies.
    """
    out: torch.Tensor = _Recomputed.apply(q, k, v, compute, beside)  # type: ignore[no-untyped-call]
    return out


def float32_copies(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return uninitialized float32 tensors of the same shapes, which take as much memory as a kernel's temporary copies."""
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


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Return softmax(scale q kᵀ + mask) v. `spec.plan` contains the keys and the mask of each query.

    Sums are computed in float32, or in float64 for float64 inputs. For 16-bit inputs torch's kernel would round every term
    of the sums in the gradients. `spec_of` gives the shapes of q, k and v.

    Returns:
        `[batch, query heads, queries, value head]` in the inputs' dtype; zero for queries without keys.
    """
    if not (spec.plan.area and q.numel()):
        return attention_to_nothing(q, k, v)
    return recomputed(partial(_in_parts, spec=spec), q, k, v)


def _in_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> torch.Tensor:
    dtype = q.dtype
    with torch.autocast(q.device.type, enabled=False):
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        spans = ((slice(*part.batch), part) for part in spec.plan.parts)
        parts = [_part(q[at], k[at], v[at], part, spec.scale) for at, part in spans]
        return torch.cat(parts).to(dtype).transpose(1, 2)


def _part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, scale: float) -> torch.Tensor:
    batch, heads, queries = q.shape[:3]
    done, at = [], 0
    for block in part.blocks:
        first, last = block.rows
        done.append(v.new_zeros(batch, first - at, heads, v.shape[3]))
        done.append(_block(q[:, :, first:last], k, v, block, scale).transpose(1, 2))
        at = last
    return torch.cat([*done, v.new_zeros(batch, queries - at, heads, v.shape[3])], 1)


def _block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Return attention for one block, `[batch, query heads, rows, value head]`. One matrix has all query heads of a key head."""
    batch, heads, rows, head = q.shape
    key_heads, keys = k.shape[1], slice(*block.keys)
    mask = None
    if block.tile is not None:
        mask = q.new_zeros(len(block.tile), rows, block.keys[1] - block.keys[0])
        mask[..., block.masked[0] - block.keys[0] : block.masked[1] - block.keys[0]] = block.tile / LOG2_E
        group = heads // key_heads
        by_head = mask.repeat(1, group, 1) if len(mask) == 1 else mask.reshape(key_heads, group * rows, -1)
        mask = by_head[None]  # with a mask of other than four dimensions, torch materializes all scores
    folded = q.reshape(batch, key_heads, -1, head)
    out = scaled_dot_product_attention(folded, k[:, :, keys], v[:, :, keys], attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, rows, v.shape[3])
