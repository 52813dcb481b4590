"""Memory that an operator's kernel allocates and frees. No dispatch mode records these tensors."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any


def _int8_product(result: Any, _: Any, on_cpu: bool) -> int:
    elements: int = result.numel()
    return 16 * elements - elements * result.itemsize if on_cpu else 4 * elements


# Operator -> bytes from (first result, arguments, whether the device is a CPU). On a CPU, bitsandbytes (0.50) computes
# int8 layers by operators of torch, with up to four tensors in int32 or float32.
_BYTES: dict[str, Callable[[Any, Any, bool], int]] = {
    "aten._safe_softmax.default": lambda scores, _, on_cpu: scores.numel(),  # a mask of bytes
    "bitsandbytes.gemm_4bit.default": lambda _, args, on_cpu: prod(args[2]) * args[0].itemsize,  # the weight
    "bitsandbytes.int8_mixed_scaled_mm.default": _int8_product,
    "bitsandbytes.int8_vectorwise_quant.default": lambda codes, _, on_cpu: (
        (8 if on_cpu else 3) * codes.numel()
    ),
}


def scratch_bytes(name: str, kind: str, args: Any, result: Any) -> int:
    """Return the most bytes that the kernel of the operator `name` allocates besides its results, on a device of this kind."""
    size = _BYTES.get(name)
    return size(result, args, kind == "cpu") if size else 0
