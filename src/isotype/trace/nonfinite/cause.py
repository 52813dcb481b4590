"""Why a result is not finite: which of its elements are new, what they would be in a wider dtype, and what made them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from isotype.core.operators import leaves, operator_name
from isotype.records.nonfinite import Cause
from isotype.trace.nonfinite.operands import Operand, readable, widened

_BY_ELEMENT = (
    "aten._to_copy",
    "aten.copy",
    "aten.clone",
    "aten.where",
    "aten.masked_fill",
    "aten.native_dropout",
)
_SOFTMAX = (
    "aten._softmax.",
    "aten._log_softmax.",
    "aten._safe_softmax.",
    "aten._scaled_dot_product",
    "aten._flash",
)
_MASKS = ("attn_mask", "attn_bias", "self")


def fresh_elements(
    func: Any, operands: Sequence[Operand], result: torch.Tensor, by_code: Sequence[bool]
) -> torch.Tensor | None:
    """Return the elements of a result that are no numbers though the operands of which they are made are.

    Args:
        func: the operator.
        operands: its float operands and numbers.
        result: its result.
        by_code: of each operand, whether it is made of constants alone: a mask, or a number in the code.

    Returns:
        Where they are, of the result's shape; None if there are none.
    """
    values = readable(result)
    if values is None:
        return None
    aligned = _aligned(func, operands, values)
    tensors = aligned or [each for operand in operands if (each := _as_tensor(operand, values)) is not None]

    def anywhere(conditions: Iterable[torch.Tensor]) -> torch.Tensor:
        """Where one of the operands meets its condition; where they do not lie element by element, at all or nowhere."""
        hit = torch.zeros((), dtype=torch.bool, device=values.device)
        for condition in conditions:
            hit = hit | (condition if aligned else condition.any())
        return hit

    nan, infinite = values.isnan(), values.isinf()
    had_nan = anywhere(each.isnan() for each in tensors)
    fresh = (nan & ~had_nan) | (infinite & ~had_nan & ~anywhere(each.isinf() for each in tensors))
    if all(by_code):
        fresh = fresh & nan
    elif aligned:
        least = torch.finfo(values.dtype).min / 2
        masks = (each <= least for each, code in zip(aligned, by_code, strict=True) if code)
        fresh = fresh & ~(anywhere(masks) & (values == -math.inf))
    return fresh if bool(fresh.any()) else None


def _as_tensor(operand: Operand, like: torch.Tensor) -> torch.Tensor | None:
    if operand.tensor is not None:
        return readable(operand.tensor)
    return torch.tensor(operand.number, dtype=torch.float64, device=like.device)


def _aligned(func: Any, operands: Sequence[Operand], values: torch.Tensor) -> list[torch.Tensor]:
    """The operands in the result's shape, where each of its elements is made of one element of each; else none."""
    if torch.Tag.pointwise not in func.tags and not operator_name(func).startswith(_BY_ELEMENT):
        return []
    tensors = [_as_tensor(operand, values) for operand in operands]
    present = [each for each in tensors if each is not None and _broadcasts(each.shape, values.shape)]
    return [each.expand(values.shape) for each in present] if len(present) == len(operands) else []


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    lacking = len(to) - len(shape)
    return lacking >= 0 and all(own in (1, other) for own, other in zip(shape, to[lacking:], strict=True))


def entries_at(func: Any, operands: Sequence[Operand], fresh: torch.Tensor) -> tuple[float, ...]:
    """The operands' values at the first of the elements `fresh`; () where the operator does not work by elements."""
    expanded = _aligned(func, operands, fresh)
    place = tuple(fresh.nonzero()[0].tolist())
    return tuple(float(each[place]) for each in expanded)


def exact_result(
    func: Any,
    call: tuple[Any, Mapping[str, Any]],
    operands: Sequence[Operand],
    fresh: torch.Tensor,
    dtype: torch.dtype,
) -> float | None:
    """Largest magnitude that the elements `fresh` of the result have in the next wider dtype.

    None if they are not finite there either, or where the operator does not run in that dtype.
    """
    wide = torch.float32 if dtype.itemsize <= 2 else torch.float64
    try:
        again = func(*widened(call[0], operands, wide), **widened(dict(call[1]), operands, wide))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None  # a kernel of one dtype, or no room for it
    for leaf in leaves(again):
        if isinstance(leaf, torch.Tensor) and leaf.shape == fresh.shape and leaf.is_floating_point():
            values = leaf[fresh]
            return float(values.abs().max()) if bool(values.isfinite().all()) else None
    return None


def cause_of(
    func: Any,
    operands: Sequence[Operand],
    result: torch.Tensor,
    exact: float | None,
    entries: Sequence[float],
) -> Cause:
    """Why the result of finite operands is not finite."""
    name = operator_name(func)
    if exact is not None:
        return "range" if exact > torch.finfo(result.dtype).max else "inside"
    if name.startswith(_SOFTMAX) and any(_masked_row(operand) for operand in operands):
        return "row"
    if name.startswith("aten.nll_loss"):
        return "labels"
    if any(operand.tensor is not None and not operand.tensor.numel() for operand in operands):
        return "empty"
    return "domain" if entries else "unknown"


def _masked_row(operand: Operand) -> bool:
    if operand.tensor is None or operand.role not in _MASKS or not operand.tensor.dim():
        return False
    return bool((operand.tensor == -math.inf).all(-1).any())
