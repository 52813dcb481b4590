"""Attention in blocks of queries whose scores stay in the caches; the backward computes the scores again.

As FlashAttention-2 (https://arxiv.org/abs/2307.08691) it keeps no matrix of scores. A block reads all of its keys at once,
though, so that its softmax is plain, and blocks of products are as large as what a core's cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from isotype.lora.attention.plan import LOG2_E, Block, Plan, Spec, attention_to_nothing

_ELEMENTS = 1 << 19
"""Scores that one thread computes at once: 2 MiB in float32. With fewer, starting the operators costs as much as they save."""

_LOWEST = -1e30
"""Stands for the largest score of a query that attends to nothing, whose scores are all -inf."""


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> torch.Tensor:
    """softmax(scale q kᵀ + mask) v, where the plan says which keys each query reads.

    Scores, their softmax and the gradients of both are float32, as are the sums; results are rounded once. torch has no product
    of 16-bit matrices with a float32 result on a CPU, and scores that are rounded to bfloat16 are off by 2⁻⁹ of themselves
    (6 % of a probability at a score of 30). So the products that give scores and outputs run in float32. What is rounded to
    `spec.work` are the operands of the gradients' products (probabilities, and gradients of scores), as in torch's own kernel.

    Args:
        q: see `spec_of`.
        k: see `spec_of`.
        v: see `spec_of`.
        spec: what `spec_of` made for these tensors.

    Returns:
        `[batch, query heads, queries, value head]` in the inputs' dtype; a transposed view of contiguous
        `[batch, queries, query heads, value head]`. Zero for queries that attend to nothing.
    """
    if not (spec.plan.area and q.numel()):
        return attention_to_nothing(q, k, v)
    out: torch.Tensor = _Attention.apply(q, k, v, spec)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> torch.Tensor:
        batch, key_heads = k.shape[:2]
        ctx.spec, ctx.key_heads = spec, key_heads
        q, k, v = (_folded(x, key_heads) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            out, sums = _forward(q, k, v, spec)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(q, k, v, sums)
        return _unfolded(out, batch, spec.plan.queries)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sums = ctx.saved_tensors
        plan = ctx.spec.plan
        needs = ctx.needs_input_grad[:3]
        with torch.autocast(q.device.type, enabled=False):
            gradients = _backward((q, k, v), sums, _folded(d_out, ctx.key_heads), ctx.spec, needs)
        lengths = plan.queries, plan.keys, plan.keys
        grads = zip(gradients, lengths, strict=True)
        return *(
            None if grad is None else _unfolded(grad, plan.batch, length) for grad, length in grads
        ), None


def _folded(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """`[batch, heads, tokens, head]` as contiguous `[batch * key heads, tokens * group, head]`.

    The query heads of one key head become rows of one matrix, so that keys are never repeated.
    """
    batch, heads, tokens, head = x.shape
    grouped = x.reshape(batch, key_heads, heads // key_heads, tokens, head).transpose(2, 3)
    return grouped.reshape(batch * key_heads, tokens * (heads // key_heads), head).contiguous()


def _unfolded(x: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Back to `[batch, heads, tokens, head]`, which lies in memory as `[batch, tokens, heads, head]`."""
    grouped = x.view(batch, -1, tokens, x.shape[1] // tokens, x.shape[2]).permute(0, 2, 1, 3, 4)
    return grouped.reshape(batch, tokens, -1, x.shape[2]).transpose(1, 2)


def _accumulating(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Scratch:
    """One buffer for all blocks: memory that is new costs more than what is computed in it."""

    def __init__(
        self, chunks: list[tuple[slice, Block]], group: int, like: torch.Tensor, dtype: torch.dtype
    ) -> None:
        sizes = [(heads.stop - heads.start) * group * _area(block) for heads, block in chunks]
        self._buffer = torch.empty(max(sizes, default=0), dtype=dtype, device=like.device)
        self._group = group

    def of(self, heads: slice, block: Block) -> torch.Tensor:
        """`[heads, rows * group, keys]`, uninitialized."""
        shape = (
            heads.stop - heads.start,
            (block.rows[1] - block.rows[0]) * self._group,
            block.keys[1] - block.keys[0],
        )
        return self._buffer[: math.prod(shape)].view(shape)


def _area(block: Block) -> int:
    return (block.rows[1] - block.rows[0]) * (block.keys[1] - block.keys[0])


def _chunks(plan: Plan, key_heads: int, group: int) -> Iterator[tuple[slice, Block]]:
    """Which matrices of the batch compute which block together."""
    budget = _ELEMENTS * torch.get_num_threads()
    for part in plan.parts:
        begin, end = (row * key_heads for row in part.batch)
        largest = max((_area(block) for block in part.blocks), default=1)
        together = max(1, budget // (group * largest))
        for first in range(begin, end, together):
            heads = slice(first, min(end, first + together))
            yield from ((heads, block) for block in part.blocks)


class _Scores:
    """Computes the scores of a block, in units of log 2 (exp2 is several times faster than exp on a CPU)."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, spec: Spec) -> None:
        dtype = _accumulating(q.dtype)
        self.group = q.shape[1] // spec.plan.queries
        self.key_heads = len(q) // spec.plan.batch
        self.chunks = list(_chunks(spec.plan, self.key_heads, self.group))
        self.q = _scaled(q, dtype, spec.scale * LOG2_E)
        self.k = k.to(dtype)
        self._scores = self.scratch(dtype)

    def scratch(self, dtype: torch.dtype) -> _Scratch:
        return _Scratch(self.chunks, self.group, self.q, dtype)

    def rows(self, block: Block) -> slice:
        """Of the matrices of queries."""
        return slice(block.rows[0] * self.group, block.rows[1] * self.group)

    def of(self, heads: slice, block: Block) -> torch.Tensor:
        """`[heads, rows * group, keys]`; good until the next call."""
        scores = self._scores.of(heads, block)
        torch.bmm(self.q[heads, self.rows(block)], self.k[heads, slice(*block.keys)].mT, out=scores)
        if block.tile is not None:
            first, last = (key - block.keys[0] for key in block.masked)
            by_row = scores.view(len(scores), -1, self.group, scores.shape[2])
            by_row[..., first:last].add_(self._tile(block.tile, heads))
        return scores

    def _tile(self, tile: torch.Tensor, heads: slice) -> torch.Tensor:
        """`[1 or heads, rows, 1 or group, masked]`"""
        if len(tile) == 1:
            return tile.unsqueeze(2)
        by_key_head = tile.view(self.key_heads, self.group, *tile.shape[1:]).transpose(1, 2)
        return by_key_head[[head % self.key_heads for head in range(heads.start, heads.stop)]]


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out `[batch * key heads, queries * group, value head]`, each query's largest score and one over its sum).

    Their logarithm in one number would be off by 2^-24 of the score: as much again as the score itself.
    """
    scores, values = _Scores(q, k, spec), v.to(_accumulating(v.dtype))
    make = torch.empty if spec.plan.whole else torch.zeros
    out = make((*q.shape[:2], v.shape[2]), dtype=v.dtype, device=v.device)
    sums = values.new_empty(*q.shape[:2], 2)
    for heads, block in scores.chunks:
        p, rows = scores.of(heads, block), scores.rows(block)
        largest = p.amax(-1, keepdim=True).clamp_min_(_LOWEST)
        torch.exp2(p.sub_(largest), out=p)
        total = p.sum(-1, keepdim=True).clamp_min_(1)  # at least 1 wherever a query attends to something
        torch.cat([largest, total.reciprocal_()], -1, out=sums[heads, rows])
        out[heads, rows] = torch.bmm(p, values[heads, slice(*block.keys)]).mul_(total)
    return out, sums


def _backward(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sums: torch.Tensor,
    d_out: torch.Tensor,
    spec: Spec,
    needs: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of q, k and v, in their shapes and dtypes, for those that need one."""
    q, k, v = tensors
    scores, exact, work = _Scores(q, k, spec), _accumulating(q.dtype), spec.work
    d_q = torch.zeros_like(q, dtype=work) if needs[0] else None
    d_k = torch.zeros_like(k, dtype=exact) if needs[1] else None
    d_v = torch.zeros_like(v, dtype=exact) if needs[2] else None
    q, k, d_work = q.to(work), k.to(work), d_out.to(work)
    d_scaled = _scaled(d_out, exact, spec.scale)
    values, grads = v.to(exact), scores.scratch(exact)
    rounded = scores.scratch(work) if work != exact else None
    for heads, block in scores.chunks:
        rows, keys = scores.rows(block), slice(*block.keys)
        p = scores.of(heads, block)
        largest, over_total = sums[heads, rows, :1], sums[heads, rows, 1:]
        torch.exp2(p.sub_(largest), out=p).mul_(over_total)
        if d_v is not None:
            _add_product(d_v[heads, keys], _in(p, rounded, heads, block).mT, d_work[heads, rows])
        if d_q is None and d_k is None:
            continue
        d_p = torch.bmm(d_scaled[heads, rows], values[heads, keys].mT, out=grads.of(heads, block)).mul_(p)
        # From what was computed here, not from the rounded output: where one probability is near 1, these two cancel.
        d_p.addcmul_(p, d_p.sum(-1, keepdim=True), value=-1)
        d_scores = _in(d_p, rounded, heads, block)
        if d_q is not None:
            torch.bmm(d_scores, k[heads, keys], out=d_q[heads, rows])
        if d_k is not None:
            _add_product(d_k[heads, keys], d_scores.mT, q[heads, rows])
    dtype = tensors[0].dtype
    return tuple(None if grad is None else grad.to(dtype) for grad in (d_q, d_k, d_v))


def _scaled(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """A scaled copy."""
    return x.to(dtype, copy=True).mul_(scale)


def _in(x: torch.Tensor, rounded: _Scratch | None, heads: slice, block: Block) -> torch.Tensor:
    """X in the working dtype: itself, or rounded into scratch."""
    return x if rounded is None else rounded.of(heads, block).copy_(x)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(torch.bmm(a, b))
