"""FLOPs of operators that multiply matrices. The formulas are PyTorch's, or isotype's if PyTorch's is missing or slow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from isotype.compat.torch import VARLEN_ATTENTION, FakeTensor, operator_packet


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of one call, two for each multiply-add; 0 for operators that multiply no matrices."""
    ours, formula = _known(func)
    if ours is not None:
        return ours(args, result)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


@functools.cache
def _known(func: Any) -> tuple[Callable[[Any, Any], int] | None, Any]:
    """Return two functions that compute the FLOPs of an operator: isotype's and torch's. A missing one is None."""
    return _OURS.get(str(func).removesuffix(".default")), flop_registry.get(operator_packet(func))


def _grouped_mm(args: Any, result: Any) -> int:
    """Return the FLOPs of a matmul of [m, k] by [k, n] whose m or k is divided into groups: 2 m k n."""
    groups = result.shape[0] if args[0].ndim == args[1].ndim == 2 else 1
    return 2 * int(args[0].shape[-1]) * int(prod(result.shape)) // int(groups)


def _attention_backward(args: Any, result: Any) -> int:
    """Return the FLOPs of attention's backward. Its first operands are the gradient, query, key and value."""
    gradient, *operands = args[:4]
    shapes = (tuple(gradient.shape), *_with_all_heads(operands))
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _scores(query: torch.Tensor, ends: torch.Tensor, longest: int) -> int:
    """Return the FLOPs of all heads' scores. If `ends` is not on a CPU, all sequences have the length `longest`."""
    tokens, heads, width = query.shape
    if ends.device.type == "cpu" and not isinstance(ends, FakeTensor):
        return 2 * heads * int(ends.diff().square().sum()) * int(width)
    return 2 * heads * tokens * longest * int(width)


def _with_all_heads(operands: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes `[batch, heads, length, width]` of query, key and value, all with the query's heads.

    Before torch 2.12, torch's FLOP formulas for attention raise an error if there are fewer key heads than query heads.

    Remove this function when the oldest supported torch is 2.12: `tests/trace/test_flops.py` then fails.
    """
    heads = operands[0].shape[1]
    return tuple((tensor.shape[0], heads, *tensor.shape[2:]) for tensor in operands)


def _product(args: Any, result: Any) -> int:
    """Return the FLOPs of a product of x [..., k] and a matrix [k, n], or a packed weight of shape [n, k]."""
    product = result[0] if isinstance(result, (list, tuple)) else result
    return 2 * int(args[0].shape[-1]) * int(prod(product.shape)) if isinstance(product, torch.Tensor) else 0


_ATTENTIONS = tuple(
    f"aten._scaled_dot_product_{kernel}"
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)

_ADDED = ("aten.addmm", "aten.addmm_", "aten.baddbmm", "aten.baddbmm_")
_OURS: dict[str, Callable[[Any, Any], int]] = {
    "aten._grouped_mm": _grouped_mm,
    **dict.fromkeys(_ATTENTIONS, lambda args, _: int(sdpa_flop_count(*_with_all_heads(args[:3])))),  # type: ignore[no-untyped-call]
    **dict.fromkeys((f"{name}_backward" for name in _ATTENTIONS), _attention_backward),
    # The query, the sequences' ends, the greatest length.
    VARLEN_ATTENTION: lambda args, _: 2 * _scores(args[0], args[3], args[6]),
    f"{VARLEN_ATTENTION}_backward": lambda args, _: 5 * _scores(args[1], args[6], args[9]),
    **dict.fromkeys(("aten.mm", "aten.mm.out", "aten.bmm"), _product),
    **dict.fromkeys(_ADDED, lambda args, result: _product(args[1:], result)),
    "bitsandbytes.gemm_4bit": _product,
    "bitsandbytes.gemv_4bit": _product,
    "bitsandbytes.int8_mixed_scaled_mm": _product,
}
