"""Finds terms of a script's loss that have lost their graph, and so change no gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from isotype.compat.torch import node_number
from isotype.core.operators import leaves
from isotype.core.source import asking_line, shown
from isotype.records.finding import in_library

_ADDS = frozenset({"add", "add_", "__add__", "__iadd__", "__radd__"})
_SUBTRACTS = frozenset({"sub", "sub_", "__sub__", "__isub__", "__rsub__", "rsub"})
_COPIES = frozenset({"tensor", "as_tensor"})
_SINGLE = ("MulBackward", "DivBackward")
"""Nodes that pass on a gradient times a constant if only one of their operands has a graph."""
_LINEAR = (*_SINGLE, "AddBackward", "SubBackward", "ToCopyBackward", "MeanBackward", "SumBackward")


class Terms:
    """The scalars of a step that were computed from trained values, but have no graph.

    Attributes:
        lost: for each such scalar that is a term of a loss: (line that drops its graph, line that adds it).
    """

    def __init__(self) -> None:
        self.lost: list[tuple[str, str]] = []
        self._cut: dict[int, str] = {}
        self._numbers: dict[float, str] = {}
        self._sums: list[tuple[Any, tuple[str, str]]] = []
        self._kept: list[torch.Tensor] = []
        self._balanced = False

    def note(self, name: str, args: Any, result: Any) -> None:
        """Record a function's result if it is a scalar without a graph, or a sum with such a scalar."""
        is_tensor = isinstance(result, torch.Tensor) and result.is_floating_point()
        is_scalar = is_tensor and (not result.ndim or name in _COPIES)
        if not (is_scalar or (name == "item" and isinstance(result, float))) or not torch.is_grad_enabled():
            return
        operands = [*leaves(args)]
        source = next(filter(None, map(self._source, operands)), "")
        trained = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in operands)
        if not is_tensor:
            # A number with few digits may be equal to another by chance.
            if (source or trained) and float(f"{result:.3g}") != result:
                self._numbers[result] = source or shown(asking_line())
        elif not result.requires_grad and (source or trained):
            self._cut[id(result)] = source or shown(asking_line())
            self._kept.append(result)
        elif result.requires_grad and source and not in_library(source):
            # `value.detach() + loss - loss.detach()` reports one value, and has the gradient of another, on purpose.
            self._balanced |= name in _SUBTRACTS
            if name in _ADDS:
                self._sums.append((result.grad_fn, (source, shown(asking_line()))))

    def _source(self, value: Any) -> str:
        """Return the line that dropped the graph of a term, which may be weighted by a number of few digits; else ""."""
        if isinstance(value, torch.Tensor):
            return self._cut.get(id(value), "")
        if not isinstance(value, float):
            return ""
        ratios = ((value / number, source) for number, source in self._numbers.items())
        return next((source for r, source in ratios if math.isclose(r, float(f"{r:.4g}"), rel_tol=1e-12)), "")

    def backward(self, loss: torch.Tensor) -> None:
        """Record the scalars without a graph that are terms of `loss`, whose backward begins."""
        summed = {node_number(node) for node in _summands(loss.grad_fn)}
        if not self._balanced:
            self.lost += [lines for node, lines in self._sums if node_number(node) in summed]


def _summands(node: Any) -> Iterator[Any]:
    """Yield the nodes of a loss on whose result the loss depends linearly."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or not type(node).__name__.startswith(_LINEAR):
            continue
        yield node
        following = [after for after, _ in node.next_functions if after is not None]
        if len(following) == 1 or not type(node).__name__.startswith(_SINGLE):
            waiting += following
