"""What an operator is given: its float tensors with the values they have before it runs, and its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isotype.compat.torch import is_traceable_wrapper_subclass
from isotype.core.operators import operator_name, schema_of, tensors_in
from isotype.records.nonfinite import Value


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the dense float values that lie here, as float32 where no kernel looks at the dtype; None if
    there are none.

    Of a sharded tensor it is this process's part; what a tensor subclass keeps in its own way cannot be read.
    """
    held: Any = tensor
    if hasattr(held, "to_local"):
        held = held.to_local()
    if not held.is_floating_point() or held.is_meta or held.layout is not torch.strided:
        return None
    if is_traceable_wrapper_subclass(held) or not held.numel():
        return None
    values: torch.Tensor = held.detach()
    return values.to(torch.float32) if values.dtype.itemsize == 1 else values


def is_finite(tensor: torch.Tensor) -> bool:
    """Return every element that can be read is a number."""
    values = readable(tensor)
    if values is None:
        return True
    least, most = torch.aminmax(values)  # one pass, nothing allocated; NaN comes through
    return bool(torch.isfinite(least) & torch.isfinite(most))


def value_of(role: str, tensor: torch.Tensor, name: str = "") -> Value:
    """Dtype, shape and magnitudes of a tensor."""
    values, shape = readable(tensor), tuple(tensor.shape)
    if values is None:
        return Value(role, tensor.dtype, shape, 0.0, 0, 0, name)
    nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    finite = values[values.isfinite()] if nan or infinite else values
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return Value(role, tensor.dtype, shape, largest, nan, infinite, name)


# What these write over is no operand.
_OVERWRITE = (
    "aten.copy_", "aten.fill_", "aten.zero_", "aten.set_", "aten.resize_", "aten.normal_", "aten.uniform_",
    "aten.bernoulli_", "aten.random_", "aten.exponential_",
)  # fmt: skip
# These take a tensor's shape and dtype, not its values.
_LIKE = ("_like.default", "aten.new_zeros", "aten.new_ones", "aten.new_full")
_NUMBERS = frozenset({"other", "exponent", "value", "fill_value", "self", "s", "scalar", "min", "max"})


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One operand.

    Attributes:
        role: the operator's name of it.
        tensor: its values before the operator ran; None for a number.
        original: the tensor that the code passed: `tensor` itself, unless the operator writes into it.
        number: the number that the code gave; None for a tensor.
    """

    role: str
    tensor: torch.Tensor | None
    original: torch.Tensor | None
    number: float | None = None


def operands_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Operand]:
    """The float operands, in the order of the arguments; those that will be written into are copied."""
    schema, name = schema_of(func), operator_name(func)
    overwrites = name.startswith(_OVERWRITE)
    like = name.endswith(_LIKE[0]) or name.startswith(_LIKE[1:])
    positional = set(schema.roles[: len(args)])
    seen = []
    for role, tensor in () if like else tensors_in(func, args, kwargs):
        argument = role.partition("[")[0]
        written = argument in schema.written
        if _is_count(tensor) and argument in _NUMBERS and not written:
            seen.append(Operand(role, None, None, float(tensor)))
        if not tensor.is_floating_point() or (written and (overwrites or argument not in positional)):
            continue
        if not written and _is_number(tensor):
            seen.append(Operand(role, None, None, float(tensor)))
        else:
            seen.append(Operand(role, tensor.clone() if written else tensor, tensor))
    for role, value in [*zip(schema.roles, args, strict=False), *kwargs.items()]:
        if role in _NUMBERS and isinstance(value, (int, float)) and not isinstance(value, bool):
            seen.append(Operand(role, None, None, float(value)))
    return seen


def _is_count(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one integer: what a sum is divided by."""
    return (
        not tensor.dim()
        and not tensor.is_floating_point()
        and not tensor.is_complex()
        and tensor.dtype != torch.bool
    )


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether torch has made the tensor of a number in the code: `x * 2.0` comes as a float64 without dimensions."""
    return not tensor.dim() and tensor.dtype == torch.float64 and tensor.device.type == "cpu"


def written_in(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes into."""
    written = schema_of(func).written
    if not written:
        return []
    return [tensor for role, tensor in tensors_in(func, args, kwargs) if role.partition("[")[0] in written]


def widened(value: Any, operands: Sequence[Operand], wide: torch.dtype) -> Any:
    """Arguments as they were before the operator ran, with every float and every float dtype in `wide`."""
    if isinstance(value, (list, tuple)):
        return type(value)([widened(each, operands, wide) for each in value])
    if isinstance(value, dict):
        return {name: widened(each, operands, wide) for name, each in value.items()}
    if isinstance(value, torch.dtype):
        return wide if value.is_floating_point else value
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    kept = next((each.tensor for each in operands if each.original is value), None)
    return (value if kept is None else kept).to(wide)
