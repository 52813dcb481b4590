"""A function over the leaves of an operator's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isotype.compat.torch import tree_map


def map_leaves(function: Callable[[Any], Any], values: Any) -> Any:
    """`tree_map`, at a tenth of the time where `values` are tuples, lists, dicts and leaves."""
    kind = type(values)
    if kind in _LEAVES or isinstance(values, torch.Tensor):
        return function(values)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, each) for each in values])
    if kind is dict:
        return {key: map_leaves(function, each) for key, each in values.items()}
    return tree_map(function, values)


_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
