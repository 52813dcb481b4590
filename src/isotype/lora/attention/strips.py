"""Attention in strips of query rows by compiled loops (strips.cpp), whose scores never leave a core's caches.

What `blocks` computes, by products of 16-bit matrices with sums in float32, which torch has no operator for on a CPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isotype.core.compiled import NotCompiledError, load_compiled
from isotype.lora.attention.plan import Plan, check_inputs
from isotype.precision.devices.cpu import this_cpu

SOURCE = Path(__file__).with_suffix(".cpp")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
_Integer = ctypes.c_int64
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Matrix(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), *((name, _Integer) for name in ("batch", "head", "token"))]


class _Block(ctypes.Structure):
    _fields_ = [
        *(
            (f"{name}_{end}", _Integer)
            for name in ("part", "row", "key", "masked")
            for end in ("first", "last")
        ),
        ("tile", ctypes.c_void_p),
        ("tile_heads", _Integer),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *(
            (name, _Integer)
            for name in ("batch", "key_heads", "group", "queries", "keys", "head", "value_head")
        ),
        *((name, _Integer) for name in ("block_count", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        ("blocks", ctypes.POINTER(_Block)),
        *((name, _Matrix) for name in ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v")),
        *((name, ctypes.c_void_p) for name in ("sums", "packed", "totals")),
    ]


@dataclass(frozen=True)
class Strips:
    """What was compiled for this CPU.

    Attributes:
        reason: why there is nothing, as a clause; None where there is.
        dtypes: what its products take.
    """

    reason: str | None
    dtypes: frozenset[torch.dtype]
    _functions: dict[str, Callable[..., None]]


@cache
def compiled_strips() -> Strips:
    """The compiled loops; compiling takes some seconds, once on a machine."""
    try:
        library = load_compiled(SOURCE, _options())
    except NotCompiledError as error:
        return Strips(str(error), frozenset(), {})
    dtypes = [dtype for dtype, name in _NAMES.items() if hasattr(library, f"forward_{name}")]
    functions = {}
    for dtype in dtypes:
        for what in ("forward", "backward", "needs"):
            name = f"{what}_{_NAMES[dtype]}"
            functions[name] = getattr(library, name)
            functions[name].restype = None
    return Strips(None, frozenset(dtypes), functions)


def _options() -> tuple[str, ...]:
    """Instructions that torch uses here, too: `ATEN_CPU_CAPABILITY` limits both."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        bfloat16 = "avx512_bf16" in (this_cpu().flags or ())
        return (*_AVX512, "-mavx512bf16") if bfloat16 else _AVX512
    return ("-mavx2", "-mfma") if capability == "AVX2" else ()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    work: torch.dtype | None = None,
) -> torch.Tensor:
    """softmax(scale q kᵀ + mask) v, as `isotype.lora.attention.blocks.attention` computes it.

    Scores, their softmax and the gradients of both are float32, and so are all sums. Operands that were computed here
    (probabilities, gradients of scores) are rounded to `work`, as in torch's own kernel.

    Args:
        q: `[batch, query heads, queries, head]`, in any layout.
        k: `[batch, key heads, keys, head]`; the query heads are a multiple of the key heads.
        v: `[batch, key heads, keys, value head]`; all three have one dtype, not float64.
        plan: of this batch and these lengths.
        scale: by default 1 / √head.
        softcap: c of c tanh(s / c); None for none.
        work: dtype of the products; by default that of the inputs. float32 where nothing was compiled for it.

    Returns:
        `[batch, query heads, queries, value head]` in the inputs' dtype; a transposed view of contiguous
        `[batch, queries, query heads, value head]`. Zero for queries that attend to nothing.

    Raises:
        ValueError: shapes or dtypes do not go together, are not the plan's, or are float64.
        NotCompiledError: nothing could be compiled here.
    """
    check_inputs(plan, q, k, v)
    if q.dtype == torch.float64:
        raise ValueError("q, k and v are torch.float64; these loops sum in float32")
    strips = compiled_strips()
    if strips.reason is not None:
        raise NotCompiledError(strips.reason)
    dtype = q.dtype if work is None else work
    spec = _Spec(
        plan,
        1 / math.sqrt(q.shape[3]) if scale is None else scale,
        softcap,
        dtype if dtype in strips.dtypes else torch.float32,
    )
    out: torch.Tensor = _Attention.apply(q, k, v, spec)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Spec:
    plan: Plan
    scale: float
    softcap: float | None
    work: torch.dtype


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: _Spec) -> torch.Tensor:
        ctx.spec = spec
        inputs = [_readable(x, spec.work) for x in (q, k, v)]
        out = _empty(q.shape[:3], v.shape[3], spec)
        sums = torch.empty(*q.shape[:3], 2, dtype=torch.float32)
        _run("forward", inputs, spec, sums, out=out)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(q, k, v, sums)
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sums = ctx.saved_tensors
        inputs = [_readable(x, ctx.spec.work) for x in (q, k, v)]
        grads = [
            _empty(x.shape[:3], x.shape[3], ctx.spec) if needed else None
            for x, needed in zip((q, k, v), ctx.needs_input_grad, strict=False)
        ]
        d_q, d_k, d_v = grads
        _run(
            "backward",
            inputs,
            ctx.spec,
            sums,
            d_out=_readable(d_out, ctx.spec.work),
            d_q=d_q,
            d_k=d_k,
            d_v=d_v,
        )
        return *(None if grad is None else grad.to(q.dtype) for grad in grads), None


def _readable(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty(shape: torch.Size, size: int, spec: _Spec) -> torch.Tensor:
    """`[batch, heads, tokens, size]`, which lies in memory as `[batch, tokens, heads, size]`; what no block writes is zero."""
    batch, heads, tokens = shape
    make = torch.empty if spec.plan.whole else torch.zeros
    return make((batch, tokens, heads, size), dtype=spec.work).transpose(1, 2)


def _run(
    what: str, inputs: list[torch.Tensor], spec: _Spec, sums: torch.Tensor, **others: torch.Tensor | None
) -> None:
    """Hand one call to the compiled loops; every tensor lives until they are done."""
    q, k, v = inputs
    functions, name = compiled_strips()._functions, _NAMES[spec.work]
    given = [(part.batch, block) for part in spec.plan.parts for block in part.blocks]
    tiles = [None if block.tile is None else block.tile.contiguous() for _, block in given]
    blocks = [
        _Block(
            *batch,
            *block.rows,
            *block.keys,
            *block.masked,
            *((None, 0) if tile is None else (tile.data_ptr(), len(tile))),
        )
        for (batch, block), tile in zip(given, tiles, strict=True)
    ]
    sizes = (
        len(q),
        k.shape[1],
        q.shape[1] // max(k.shape[1], 1),
        q.shape[2],
        k.shape[2],
        q.shape[3],
        v.shape[3],
    )
    call = _Call(
        *sizes,
        len(blocks),
        torch.get_num_threads(),
        spec.scale,
        spec.softcap or 0.0,
        (_Block * len(blocks))(*blocks),
    )
    for key, x in {"q": q, "k": k, "v": v, **others}.items():
        setattr(call, key, _Matrix() if x is None else _Matrix(x.data_ptr(), *x.stride()[:3]))
    lanes, floats = _Integer(), _Integer()
    functions[f"needs_{name}"](
        ctypes.byref(call), what == "backward", ctypes.byref(lanes), ctypes.byref(floats)
    )
    packed, totals = torch.empty(lanes.value, dtype=torch.int32), torch.empty(floats.value)
    call.sums, call.packed, call.totals = sums.data_ptr(), packed.data_ptr(), totals.data_ptr()
    functions[f"{what}_{name}"](ctypes.byref(call))
