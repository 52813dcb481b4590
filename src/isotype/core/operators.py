"""Operators of torch by name, their schemas, and the tensors among their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from isotype.compat.torch import UNNAMED_VIEW, operator_schema

# Of experts. torch 2.13's kernels for the meta device and for fakes take bfloat16 only (`_meta_grouped_mm_common` in
# torch/_meta_registrations.py); the CPU's and CUDA's take float32 and float16 too. tests/trace/test_recorder.py says when this can go.
BFLOAT16_WITHOUT_MEMORY = frozenset({"aten._grouped_mm.default"})
"""Names of operators that take bfloat16 only of tensors without memory."""

ATTENTION_KERNELS = (
    "scaled_dot_product", "flash_attn", "_flash_attention", "_efficient_attention", "_varlen_attn",
)  # fmt: skip
"""Parts of the names of attention's kernels, torch's and flash-attn's."""


@dataclass(frozen=True, slots=True)
class Schema:
    """Arguments of an operator by name, and which of them it writes to."""

    roles: tuple[str, ...]
    mutates: bool
    written: frozenset[str]


@cache
def operator_name(func: Any) -> str:
    """`aten.mm.default`; torch puts it together again each time."""
    return str(func)


@cache
def schema_of(func: Any) -> Schema:
    """Of an operator (`OpOverload`)."""
    arguments = operator_schema(func).arguments
    first = arguments[0] if arguments else None
    mutates = first is not None and first.alias_info is not None and first.alias_info.is_write
    written = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return Schema(tuple(argument.name for argument in arguments), mutates, frozenset(written))


def tensors_in(func: Any, args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors among an operator's arguments, by the names of its schema: `self`, `tensors[0]`."""
    tensors: list[tuple[str, torch.Tensor]] = []
    roles = schema_of(func).roles
    for position, value in enumerate(args):
        _add(tensors, roles[position], value)
    for name, value in kwargs.items():
        _add(tensors, name, value)
    return tensors


def numbers_in(func: Any, args: Any, kwargs: Any) -> tuple[tuple[str, float], ...]:
    """The Python floats among an operator's arguments, by the names of its schema: `(("eps", 1e-12),)`."""
    floats = [(position, value) for position, value in enumerate(args) if type(value) is float]
    if not floats and not kwargs:
        return ()
    roles = schema_of(func).roles
    named = ((name, value) for name, value in kwargs.items() if type(value) is float)
    return (*((roles[position], value) for position, value in floats), *named)


def _add(tensors: list[tuple[str, torch.Tensor]], role: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append((role, value))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                tensors.append((f"{role}[{index}]", item))


def leaves(result: Any) -> Iterator[Any]:
    """What lies in nested lists and tuples."""
    if isinstance(result, (list, tuple)):
        for item in result:
            yield from leaves(item)
    else:
        yield result


def given_tensors(args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors among a function's arguments, lists gone through, numbered by where they stand."""
    arguments = enumerate(leaves((args, tuple(kwargs.values()))))
    return [(f"[{i}]", leaf) for i, leaf in arguments if isinstance(leaf, torch.Tensor)]


@cache
def is_view(func: Any) -> bool:
    """Whether an operator computes nothing: its result is the operand's own memory."""
    aliases = (each.alias_info for each in operator_schema(func).returns)
    return func is UNNAMED_VIEW or any(alias is not None and not alias.is_write for alias in aliases)
