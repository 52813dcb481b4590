"""Operators whose result is their operand's own memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from isotype.compat.torch import operator_schema

# Its schema names no alias, but nothing is copied; a fused LoRA layer shapes its outputs by it before they have numbers.
_UNNAMED = frozenset({torch.ops.aten._unsafe_view.default})


@cache
def is_view(func: Any) -> bool:
    """Whether an operator computes nothing: its result is the operand's own memory."""
    aliases = (each.alias_info for each in operator_schema(func).returns)
    return func in _UNNAMED or any(alias is not None and not alias.is_write for alias in aliases)
