"""torch's variable-length attention on a CPU, which has none: the kernels of its operators as plain sums, one sequence after another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.library import register_kernel
from torch.nn.attention import varlen

calls: list[dict[str, Any]] = []
"""What the forward was called with, newest last."""


def _spans(ends: torch.Tensor) -> Iterator[slice]:
    for begin, end in pairwise(ends.tolist()):
        yield slice(begin, end)


def _probabilities(q: torch.Tensor, k: torch.Tensor, window: list[int], scale: float | None) -> torch.Tensor:
    """Softmax of the scores of one sequence, float64 `[heads, queries, keys]`; negative windows are open."""
    each = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).double()
    scores = torch.einsum("qhd,khd->hqk", q.double(), each) * _scale(q, scale)
    behind = torch.arange(len(q))[:, None] - torch.arange(len(k))
    left, right = window
    closed = ((left >= 0) & (behind > left)) | ((right >= 0) & (behind < -right))
    return scores.masked_fill(closed, -math.inf).softmax(-1)


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _forward(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: Any = None, *_: Any
) -> Any:  # fmt: skip
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert int(cu_seq_q[-1]) == len(query) == len(key)
    assert is_causal == (list(window_size) == [-1, 0])
    calls.append({"longest": max_q, "window": tuple(window_size), "sequences": len(cu_seq_q) - 1})
    groups = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for span in _spans(cu_seq_q):
        p = _probabilities(query[span], key[span], window_size, scale)
        out[span] = torch.einsum("hqk,khd->qhd", p, value[span].repeat_interleave(groups, dim=1).double())
    statistics = query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
    return out, statistics, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, cu_seq_q: Any, cu_seq_k: Any,
    max_q: int, max_k: int, is_causal: bool, rng_state: Any, scale: float | None = None, window_size: Any = None,
) -> Any:  # fmt: skip
    groups, factor = query.shape[1] // key.shape[1], _scale(query, scale)
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for span in _spans(cu_seq_q):
        p = _probabilities(query[span], key[span], window_size, scale)
        keys, values = (x[span].repeat_interleave(groups, dim=1).double() for x in (key, value))
        dp = torch.einsum("qhd,khd->hqk", grad_out[span].double(), values)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * factor
        d_key = torch.einsum("hqk,qhd->khd", ds, query[span].double())
        d_value = torch.einsum("hqk,qhd->khd", p, grad_out[span].double())
        grads[0][span] = torch.einsum("hqk,khd->qhd", ds, keys)
        for grad, shared in zip(grads[1:], (d_key, d_value), strict=True):
            grad[span] = shared.unflatten(1, (-1, groups)).sum(2)
    return tuple(grads)


def register() -> None:
    """Give this process's CPU both kernels; where they are, nothing else of torch changes."""
    register_kernel(varlen._varlen_attn, "cpu", _forward)  # type: ignore[arg-type]
    register_kernel(varlen._varlen_attn_backward, "cpu", _backward)  # type: ignore[arg-type]
