"""FLOPs of matmul-like operators: PyTorch's own formulas, and those of operators it does not count."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of one call (a multiply-add counts two); 0 for operators that are no matmul."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    own = _OWN.get(str(func).removesuffix(".default"))
    return 0 if own is None else int(own(args, result))


def _grouped_mm(args: Any, result: Any) -> int:
    """Rows [m, k] in groups, each with its own [k, n]: 2 m k n, however the rows are shared out."""
    return 2 * int(args[0].shape[-1]) * int(prod(result.shape))


def _attention(args: Any, result: Any) -> int:
    shapes = (tuple(tensor.shape) for tensor in args[:3])
    return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _attention_backward(args: Any, result: Any) -> int:
    shapes = (tuple(tensor.shape) for tensor in args[:4])
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _gemm_4bit(args: Any, result: Any) -> int:
    """x [..., k] by a packed weight of [n, k]."""
    made = result[0] if isinstance(result, (list, tuple)) else result
    return 2 * int(args[0].shape[-1]) * int(prod(made.shape)) if isinstance(made, torch.Tensor) else 0


_OWN: dict[str, Callable[[Any, Any], int]] = {
    "aten._grouped_mm": _grouped_mm,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "bitsandbytes.gemm_4bit": _gemm_4bit,
    "bitsandbytes.gemv_4bit": _gemm_4bit,
    "bitsandbytes.int8_linear_matmul": _gemm_4bit,
}
