"""A naive reference: a mode that looks at every result of every operator, and at every operand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def broken(values: Any) -> bool:
    floats = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return any(not torch.isfinite(v).all() for v in floats)


def only_minus_infinity(result: Any) -> bool:
    """Whether a result's values are numbers and -inf, as those of masks are."""
    return all(bool((v.isfinite() | (v == -math.inf)).all()) for v in tree_leaves(result))


_VIEWS = ("view", ".t.", "transpose", "slice", "expand", "empty", "detach", "alias", "unsqueeze", "select")
_MASKS = ("add.", "scalar_tensor", "where", "masked_fill", "full")


class Naive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operator.

    Args:
        over: whether only an operator counts whose operands are all finite.

    Attributes:
        first: (operator, shape of the result) of the first whose result is not finite.
    """

    def __init__(self, over: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.over = over
        self.first: tuple[str, tuple[int, ...]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = str(func), broken((args, kwargs)) if self.first is None else False
        result = func(*args, **(kwargs or {}))
        if self.first is None and broken(result) and not any(view in name for view in _VIEWS):
            mask = any(each in name for each in _MASKS) and only_minus_infinity(result)
            if not mask and not (given and self.over):
                made = [v for v in tree_leaves(result) if isinstance(v, torch.Tensor) and broken(v)]
                self.first = (name, tuple(made[0].shape))
        return result
