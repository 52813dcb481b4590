"""Finds the cause of a non-finite result: from the operator's operands, and by a computation in a wider dtype."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from isotype.compat.torch import is_traceable_wrapper_subclass, tree_map
from isotype.core.operators import leaves, schema_of
from isotype.model.finite import only_finite
from isotype.model.shard import local
from isotype.records.nonfinite import Cause, Value
from isotype.trace.operator_call import CallPlace, OperatorCall

_BY_ELEMENT = (
    "aten._to_copy", "aten.copy", "aten.clone", "aten.where", "aten.masked_fill", "aten.native_dropout",
)  # fmt: skip
_SOFTMAX = (
    "aten._softmax.", "aten._log_softmax.", "aten._safe_softmax.", "aten._scaled_dot_product",
    "aten._flash",
)  # fmt: skip
_MASKS = ("attn_mask", "attn_bias", "self")


@dataclass(frozen=True, slots=True, eq=False)
class TensorOperand:
    """An operand of an operator.

    Attributes:
        role: name of the operator's argument.
        tensor: the operand with its values before the operator ran; for a number, a tensor in float64.
        original: the tensor in the code, which the operator may overwrite; None for a number.
    """

    role: str
    tensor: torch.Tensor
    original: torch.Tensor | None


class TensorCall(OperatorCall):
    """A call of an operator, with the values of its operands before the call."""

    def __init__(self, func: Any, args: Any, kwargs: Any, place: CallPlace) -> None:
        super().__init__(func, args, kwargs, place)
        self.operands = _operands_of(self)


def fresh_elements(call: TensorCall, result: torch.Tensor, by_code: Sequence[bool]) -> torch.Tensor | None:
    """Return a mask of the non-finite elements that an operator has computed from finite operands; None if there are none.

    `by_code` has True for each operand that consists of constants in the code, such as a mask or a number.
    """
    values = readable(result)
    if values is None:
        return None
    aligned = _aligned(call, values)
    tensors = aligned or _read(call, values.device)

    def anywhere(conditions: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return a mask of elements that meet a condition; if the operator is not element-wise, whether any element does."""
        hit = torch.zeros((), dtype=torch.bool, device=values.device)
        for condition in conditions:
            hit = hit | (condition if aligned else condition.any())
        return hit

    nan, infinite = values.isnan(), values.isinf()
    had_nan = anywhere(tensor.isnan() for tensor in tensors)
    fresh = (nan & ~had_nan) | (infinite & ~had_nan & ~anywhere(tensor.isinf() for tensor in tensors))
    if all(by_code):
        fresh = fresh & nan
    elif aligned:
        least = torch.finfo(values.dtype).min / 2
        masks = (tensor <= least for tensor, code in zip(aligned, by_code, strict=True) if code)
        fresh = fresh & ~(anywhere(masks) & (values == -math.inf))
    return fresh if bool(fresh.any()) else None


def _read(call: TensorCall, device: torch.device) -> list[torch.Tensor]:
    """Return the operands that can be read."""
    operands = (readable(operand.tensor) for operand in call.operands)
    return [operand.to(device) for operand in operands if operand is not None]


def _aligned(call: TensorCall, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the operands expanded to the result's shape; an empty list if the operator is not element-wise."""
    if torch.Tag.pointwise not in call.func.tags and not call.name.startswith(_BY_ELEMENT):
        return []
    tensors = _read(call, values.device)
    complete = len(tensors) == len(call.operands)
    try:
        return [tensor.expand(values.shape) for tensor in tensors] if complete else []
    except RuntimeError:
        return []  # an operand of another shape


def entries_at(call: TensorCall, fresh: torch.Tensor) -> tuple[float, ...]:
    """Return the operands' values at the first True in `fresh`; () for an operator that is not element-wise."""
    place = tuple(fresh.nonzero()[0].tolist())
    return tuple(float(tensor[place]) for tensor in _aligned(call, fresh))


def exact_result(call: TensorCall, fresh: torch.Tensor, dtype: torch.dtype) -> float | None:
    """Compute the result in the next wider dtype, and return its largest magnitude where the mask `fresh` is True.

    Return None if one of these elements is not finite in the wider dtype, or if the operator refuses the dtype.
    """
    wide = torch.float32 if dtype.itemsize <= 2 else torch.float64
    try:
        args, kwargs = tree_map(partial(_widened, call.operands, wide), (call.args, call.kwargs))
        again = call.func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None  # the kernel supports no other dtype, or memory is exhausted
    for leaf in leaves(again):
        if isinstance(leaf, torch.Tensor) and leaf.shape == fresh.shape and leaf.is_floating_point():
            values = leaf[fresh]
            return float(values.abs().max()) if bool(values.isfinite().all()) else None
    return None


def cause_of(call: TensorCall, result: torch.Tensor, exact: float | None, entries: Sequence[float]) -> Cause:
    """Return the reason why the result of finite operands is not finite."""
    if exact is not None:
        return "range" if exact > torch.finfo(result.dtype).max else "inside"
    if call.name.startswith(_SOFTMAX) and any(map(_masked_row, call.operands)):
        return "row"
    if call.name.startswith("aten.nll_loss"):
        return "labels"
    if any(not operand.tensor.numel() for operand in call.operands):
        return "empty"
    return "domain" if entries else "unknown"


def _masked_row(operand: TensorOperand) -> bool:
    if operand.role not in _MASKS or not operand.tensor.dim():
        return False
    return bool((operand.tensor == -math.inf).all(-1).any())


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's dense float values (float8 values as float32); None if the tensor has no such values.

    For a sharded tensor, the values of this process are returned. Other tensor subclasses cannot be read.
    """
    values: Any = local(tensor)
    if not values.is_floating_point() or values.is_meta or values.layout is not torch.strided:
        return None
    if is_traceable_wrapper_subclass(values) or not values.numel():
        return None
    dense: torch.Tensor = values.detach()
    return dense.to(torch.float32) if dense.itemsize == 1 else dense


def is_finite(tensor: torch.Tensor) -> bool:
    values = readable(tensor)
    return values is None or only_finite(values)


def value_of(role: str, tensor: torch.Tensor, name: str = "") -> Value:
    """Return the record of a tensor: its dtype, shape, largest finite magnitude, and numbers of NaN and infinities."""
    values, shape = readable(tensor), tuple(tensor.shape)
    if values is None:
        return Value(role, tensor.dtype, shape, 0.0, 0, 0, name)
    nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    finite = values[values.isfinite()] if nan or infinite else values
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return Value(role, tensor.dtype, shape, largest, nan, infinite, name)


# Operators that overwrite their target without reading it.
_OVERWRITE = (
    "aten.copy_", "aten.fill_", "aten.zero_", "aten.set_", "aten.resize_", "aten.normal_", "aten.uniform_",
    "aten.bernoulli_", "aten.random_", "aten.exponential_",
)  # fmt: skip
# Operators that use only the shape and dtype of a tensor.
_LIKE = ("_like.default", "aten.new_zeros", "aten.new_ones", "aten.new_full")
_NUMBERS = frozenset({"other", "exponent", "value", "fill_value", "self", "s", "scalar", "min", "max"})


def _operands_of(call: OperatorCall) -> list[TensorOperand]:
    """Return the float operands in the order of the arguments. Operands that the operator overwrites are copied."""
    schema, name = schema_of(call.func), call.name
    overwrites = name.startswith(_OVERWRITE)
    like = name.endswith(_LIKE[0]) or name.startswith(_LIKE[1:])
    positional = set(schema.roles[: len(call.args)])
    operands = []
    for role, tensor in () if like else call.tensors:
        argument = role.partition("[")[0]
        written = argument in schema.written
        counts = not (tensor.dim() or tensor.is_floating_point() or tensor.is_complex())
        if counts and tensor.dtype != torch.bool and argument in _NUMBERS and not written:
            operands.append(TensorOperand(role, tensor.cpu().double(), None))  # an Apple GPU has no float64
        if not tensor.is_floating_point() or (written and (overwrites or argument not in positional)):
            continue
        # torch makes a 0-dim float64 tensor from 2.0 in `x * 2.0`.
        number = not tensor.dim() and tensor.dtype == torch.float64 and tensor.device.type == "cpu"
        before, original = tensor.clone() if written else tensor, None if number and not written else tensor
        operands.append(TensorOperand(role, before, original))
    for role, value in [*zip(schema.roles, call.args, strict=False), *call.kwargs.items()]:
        if role in _NUMBERS and isinstance(value, (int, float)) and not isinstance(value, bool):
            operands.append(
                TensorOperand(role, torch.tensor(float(value), dtype=torch.float64, device="cpu"), None)
            )
    return operands


def _widened(operands: Sequence[TensorOperand], wide: torch.dtype, value: Any) -> Any:
    """Replace a float dtype by `wide`, and cast a float tensor to `wide`, with its values from before the call."""
    if isinstance(value, torch.dtype):
        return wide if value.is_floating_point else value
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    before = next((operand.tensor for operand in operands if operand.original is value), None)
    return (value if before is None else before).to(wide)
