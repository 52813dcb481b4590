"""Operands and results of an operator in another float dtype than they came in."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from isotype.compat.torch import FakeTensor, unset_fake_temporarily
from isotype.core.operators import leaves
from isotype.records.trace import FLOATS

aten = torch.ops.aten


def converted(value: Any, target: torch.dtype) -> Any:
    """An argument with its float tensors in `target`."""
    if isinstance(value, torch.Tensor):
        wrong = value.dtype in FLOATS and value.dtype != target
        return aten._to_copy.default(value, dtype=target) if wrong else value
    if isinstance(value, (list, tuple)):
        return type(value)(converted(each, target) for each in value)
    return value


def made_in(dtype: torch.dtype, result: Any) -> Any:
    """What an operator made of no float, in another float dtype."""
    if not isinstance(result, torch.Tensor) or result.dtype not in FLOATS or result.dtype == dtype:
        return result
    with contextlib.nullcontext() if isinstance(result, FakeTensor) else unset_fake_temporarily():
        return aten._to_copy.default(result, dtype=dtype)


def as_measured(result: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """An operator's results in the dtypes that were measured on the device, where their number is the same."""
    outputs = list(leaves(result))
    if len(outputs) != len(dtypes) or all(
        not isinstance(leaf, torch.Tensor) or leaf.dtype == dtype
        for leaf, dtype in zip(outputs, dtypes, strict=True)
    ):
        return result
    cast = [
        aten._to_copy.default(leaf, dtype=dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf, dtype in zip(outputs, dtypes, strict=True)
    ]
    return tuple(cast) if isinstance(result, (list, tuple)) else cast[0]
