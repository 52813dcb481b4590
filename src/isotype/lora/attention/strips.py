"""Computes attention by compiled loops (strips.cpp) for a few queries at a time. The scores of these queries fit into
the caches of a core.

The loops sum products of 16-bit matrices in float32, because torch has no CPU operator for such products.
"""

import ctypes
import math
import struct
from array import array
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from isotype.core.compiled import NotCompiledError
from isotype.core.dtypes import COMPUTE_DTYPES
from isotype.core.operators import operator
from isotype.lora.attention.plan import Plan, attention_to_nothing
from isotype.lora.loops.loading import loops_of
from isotype.precision.devices.simulated import working_dtype

_HEADERS = (Path(__file__).parents[1] / "loops" / name for name in ("products.h", "vectors.h"))
compiled_strips = cache(partial(loops_of, Path(__file__).with_suffix(".cpp"), *_HEADERS))
"""Returns the compiled loops. The first call on a machine compiles for some seconds."""
_MATRICES = ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v")
_CALL = struct.Struct(f"=9qf4xq{4 * len(_MATRICES)}q3q")
"""The struct `Call` of strips.cpp: sizes, scale, address of blocks, matrices, addresses of sums, packed and totals."""


def attention_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype for the products of attention: float32 if `x` is float16 or emulated bfloat16, else the dtype of
    `x`.

    In float16, the gradients of the scores would overflow, because they are multiplied by the loss scale.
    """
    return torch.float32 if x.dtype == torch.float16 else working_dtype(x.dtype, x)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    scale: float | None = None,
    work: torch.dtype | None = None,
) -> torch.Tensor:
    """Return softmax(scale q kᵀ + mask) v, `[batch, query heads, queries, value head]`. It is zero for queries without
    keys.

    Scores, softmax, the gradients of both and all sums are float32. If compiled loops support the dtype `work`, they
    round operands of products (probabilities and gradients of scores) to `work`, as torch's kernel does. If a masked
    key or value is not finite, the result may be NaN, as in torch's kernel.

    Args:
        q: `[batch, query heads, queries, head]`, in any layout.
        k: `[batch, key heads, keys, head]`. The number of query heads is a multiple of the number of key heads.
        v: `[batch, key heads, keys, value head]`. All three tensors have the same dtype.
        plan: the keys and the mask of each query.
        scale: None means 1 / √head.
        work: dtype of the products. None means `attention_dtype(q)`.

    Raises:
        ValueError: the shapes or dtypes do not match, the tensors do not fit the plan, or they are float64.
        NotCompiledError: the loops could not be compiled.
    """
    (batch, heads, queries, head), (key_heads, keys) = q.shape, k.shape[1:3]
    if k.shape != (batch, key_heads, keys, head) or v.shape[:3] != k.shape[:3] or heads % max(key_heads, 1):
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not match")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; they need one dtype of at most 32 bits"
        )
    if (plan.batch, plan.queries, plan.keys) != (batch, queries, keys):
        raise ValueError(
            f"the plan is for {plan.batch} x {plan.queries} queries and {plan.keys} keys, "
            f"the inputs have {batch} x {queries} and {keys}"
        )
    strips = compiled_strips()
    if strips.reason is not None:
        raise NotCompiledError(strips.reason)
    if not (plan.area and q.numel()):
        return attention_to_nothing(q, k, v)
    work = work or attention_dtype(q)
    work = work if strips.has("forward", work) else torch.float32
    arguments = _arguments(plan, 1 / math.sqrt(head) if scale is None else scale)
    out: torch.Tensor = _Attention.apply(q, k, v, arguments, work)  # type: ignore[no-untyped-call]
    return out


def _arguments(plan: Plan, scale: float) -> tuple[list[torch.Tensor], list[int], float, bool]:
    """Return the arguments (tiles, blocks, scale, whole) of the operators.

    Each block consists of nine numbers. The last number is the index of the block's tile, or -1 without a tile. `whole`
    is True if every query is in a block.
    """
    blocks: list[int] = []
    tiles: list[torch.Tensor] = []
    for block in plan.blocks:
        blocks += (*block.batch, *block.rows, *block.keys, *block.masked)
        blocks.append(-1 if block.tile is None else len(tiles))
        tiles += [] if block.tile is None else [block.tile.contiguous()]
    return tiles, blocks, scale, plan.whole


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Any, work: torch.dtype
    ) -> torch.Tensor:
        ctx.arguments, ctx.work = arguments, work
        q_, k_, v_ = (_readable(x, work) for x in (q, k, v))
        out, sums = _forward(q_, k_, v_, *arguments)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(q, k, v, sums)
        result: torch.Tensor = out.to(q.dtype)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sums = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        d_, q_, k_, v_ = (_readable(x, ctx.work) for x in (d_out, q, k, v))
        tiles, blocks, scale, whole = ctx.arguments
        grads = _backward(d_, q_, k_, v_, sums, tiles, blocks, scale, whole, needed)
        results = (grad.to(q.dtype) if need else None for grad, need in zip(grads, needed, strict=True))
        return *results, None, None


def traced(compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Return `compute(*inputs)` in a trace. Allocate float32 copies of the inputs, because `attention` also allocates
    them.

    Only the inputs are saved. The backward computes the result again.
    """
    out: torch.Tensor = _Traced.apply(compute, *inputs)  # type: ignore[no-untyped-call]
    return out


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        _alive = [torch.empty_like(x, dtype=torch.float32) for x in inputs]
        return compute(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        # The float32 copies of the operands, and the float32 gradients.
        _alive = [torch.empty_like(x, dtype=torch.float32) for x in (d_out, *inputs, *inputs)]
        with torch.enable_grad():
            out = ctx.compute(*inputs)
        grads = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], d_out))
        return None, *(next(grads) if need else None for need in needed)


def _readable(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


@operator(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor[] tiles, int[] blocks, float scale, bool whole)"
    " -> (Tensor, Tensor)"
)
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: list[torch.Tensor], blocks: list[int],
    scale: float, whole: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out, sums = _empty(q, v.shape[3], whole), torch.empty(*q.shape[:3], 2, dtype=torch.float32)
    _run("forward", {"q": q, "k": k, "v": v, "out": out}, sums, tiles, blocks, scale)
    return out, sums


@operator(
    "attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor sums, Tensor[] tiles, int[] blocks, float scale,"
    " bool whole, bool[] needed) -> (Tensor, Tensor, Tensor)"
)
def _backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sums: torch.Tensor,
    tiles: list[torch.Tensor], blocks: list[int], scale: float, whole: bool, needed: list[bool],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    pairs = zip((q, k, v), needed, strict=True)
    grads = [_empty(x, x.shape[3], whole) if need else x.new_empty(0) for x, need in pairs]
    every = zip(("d_q", "d_k", "d_v"), grads, needed, strict=True)
    wanted = {name: grad for name, grad, need in every if need}
    _run("backward", {"q": q, "k": k, "v": v, "d_out": d_out, **wanted}, sums, tiles, blocks, scale)
    return tuple(grads)


def _empty(like: torch.Tensor, size: int, whole: bool) -> torch.Tensor:
    """Return a new tensor `[batch, heads, tokens, size]` with the memory layout `[batch, tokens, heads, size]`."""
    batch, heads, tokens = like.shape[:3]
    return (like.new_empty if whole else like.new_zeros)((batch, tokens, heads, size)).transpose(1, 2)


def _run(
    what: str,
    matrices: Mapping[str, torch.Tensor],
    sums: torch.Tensor,
    tiles: list[torch.Tensor],
    blocks: list[int],
    scale: float,
) -> None:
    """Call the compiled loops with the tensors' addresses. The caller must keep the tensors alive."""
    strips, q, k, v = compiled_strips(), matrices["q"], matrices["k"], matrices["v"]
    structs = array("q")
    for start in range(0, len(blocks), 9):
        *numbers, tile = blocks[start : start + 9]
        structs.extend((*numbers, *((0, 0) if tile < 0 else (tiles[tile].data_ptr(), len(tiles[tile])))))
    places: list[int] = []
    for name in _MATRICES:
        x = matrices.get(name)
        places += (0, 0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:3])
    (batch, heads, queries, head), (key_heads, keys) = q.shape, k.shape[1:3]
    sizes = batch, key_heads, heads // max(key_heads, 1), queries, keys, head, v.shape[3], len(blocks) // 9
    head_of_call = *sizes, torch.get_num_threads(), scale, structs.buffer_info()[0], *places, sums.data_ptr()
    lanes, floats = ctypes.c_int64(), ctypes.c_int64()
    call = _CALL.pack(*head_of_call, 0, 0)
    strips.run("needs", q.dtype, call, what == "backward", ctypes.byref(lanes), ctypes.byref(floats))
    packed = torch.empty(lanes.value, dtype=torch.int32)
    totals = torch.empty(floats.value, dtype=torch.float32)
    strips.run(what, q.dtype, _CALL.pack(*head_of_call, packed.data_ptr(), totals.data_ptr()))
