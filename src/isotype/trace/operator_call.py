"""A call of an operator: its place, its operands, its FLOPs, and the memory that its kernel allocates and frees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from isotype.compat.torch import VARLEN_ATTENTION, FakeTensor, operator_packet
from isotype.core.dtypes import FLOATS
from isotype.core.operators import operator_name, schema_of, tensors_in
from isotype.records.trace import Breach


@dataclass(slots=True)
class CallPlace:
    """The place of an operator: module and source line. The operator stands for `repeats` equal operators."""

    module: str
    source: Any
    repeats: int
    breached: bool = False
    backward: dict[Any, CallPlace] = field(default_factory=dict)

    def written_at(self, source: Any) -> CallPlace:
        """Return the place for an operator at the line `source` in the backward of a `torch.autograd.Function`."""
        if source is None:
            return self  # torch's own code runs the operator (gradient checkpointing)
        return self.backward.setdefault(source, CallPlace(self.module, source, self.repeats))


class OperatorCall:
    """A call of an operator.

    Attributes:
        name: name of the operator, such as `aten.mm.default`.
        tensors: (argument name, tensor) of each tensor argument.
        breach: the contract that the call has broken; None if there is none.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, place: CallPlace) -> None:
        self.func, self.args, self.kwargs, self.place = func, args, kwargs, place
        self.name, self.tensors = operator_name(func), tensors_in(func, args, kwargs)
        self.breach: Breach | None = None

    def but(self, args: Any, kwargs: Any) -> OperatorCall:
        """Return a call of the same operator with other arguments."""
        return OperatorCall(self.func, args, kwargs, self.place)

    @cached_property
    def floats(self) -> list[torch.Tensor]:
        """The float operands."""
        return [tensor for _, tensor in self.tensors if tensor.dtype in FLOATS]

    @property
    def written(self) -> list[torch.Tensor]:
        """The operands into which the operator writes."""
        written = schema_of(self.func).written
        operands = self.tensors if written else ()
        return [tensor for role, tensor in operands if role.partition("[")[0] in written]


# FLOPs of operators that multiply matrices, by PyTorch's formulas, or by isotype's if PyTorch's is missing or slow.
def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of one call, two for each multiply-add; 0 for operators that multiply no matrices."""
    ours, formula = _known(func)
    if ours is not None:
        return ours(args, result)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


@cache
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

_OVERLOADS = ("", ".out", ".dtype", ".dtype_out")  # torch's formulas of addmm and bmm take no result dtype
_PRODUCTS = [f"aten.{name}{overload}" for name in ("mm", "bmm") for overload in _OVERLOADS]
_ADDED = [f"aten.{name}{overload}" for name in ("addmm", "baddbmm") for overload in ("_", *_OVERLOADS)]
_OURS: dict[str, Callable[[Any, Any], int]] = {
    "aten._grouped_mm": _grouped_mm,
    **dict.fromkeys(_ATTENTIONS, lambda args, _: int(sdpa_flop_count(*_with_all_heads(args[:3])))),  # type: ignore[no-untyped-call]
    **dict.fromkeys((f"{name}_backward" for name in _ATTENTIONS), _attention_backward),
    # The query, the sequences' ends, the greatest length.
    VARLEN_ATTENTION: lambda args, _: 2 * _scores(args[0], args[3], args[6]),
    f"{VARLEN_ATTENTION}_backward": lambda args, _: 5 * _scores(args[1], args[6], args[9]),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_ADDED, lambda args, result: _product(args[1:], result)),
    "bitsandbytes.gemm_4bit": _product,
    "bitsandbytes.gemv_4bit": _product,
    "bitsandbytes.int8_mixed_scaled_mm": _product,
}


# Memory that an operator's kernel allocates and frees. No dispatch mode records these tensors.
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
