"""Finds terms of a loss that have lost their graph, while a step is recorded."""

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
"""Nodes of a product or quotient, which are linear if only one operand has a graph."""
_LINEAR = (*_SINGLE, *(f"{name}Backward" for name in ("Add", "Sub", "Stack", "ToCopy", "Mean", "Sum")))


class Terms:
    """Finds terms of a loss that were computed from trained weights but have no graph.

    Attributes:
        losses: the scalars whose backward has begun.
        lost: (line where a term loses its graph, line that adds the term to the loss) for each term without a graph.
    """

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.lost: list[tuple[str, str]] = []
        self._cut: dict[int, set[str]] = {}
        self._numbers: dict[float, set[str]] = {}
        self._sums: list[tuple[Any, tuple[str, str]]] = []
        self._kept: list[torch.Tensor] = []
        self._balanced = False

    def note(self, name: str, args: Any, result: Any) -> None:
        """Record a function's result if it is a scalar without a graph, or a sum that contains such a scalar."""
        is_tensor = isinstance(result, torch.Tensor) and result.is_floating_point()
        is_scalar = is_tensor and (not result.ndim or name in _COPIES or name == "stack")
        if not (is_scalar or (name == "item" and isinstance(result, float))) or not torch.is_grad_enabled():
            return
        operands = [*leaves(args)]
        sources = set[str]().union(*map(self._sources, operands))
        trained = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in operands)
        if not is_tensor:
            # A number with few digits may be equal to another by chance.
            if (sources or trained) and float(f"{result:.3g}") != result:
                self._numbers[result] = sources or {shown(asking_line())}
        elif not result.requires_grad and (sources or trained):
            self._cut[id(result)] = sources or {shown(asking_line())}
            self._kept.append(result)
        elif result.requires_grad and (outside := sorted(s for s in sources if not in_library(s))):
            # `value.detach() + loss - loss.detach()` is intended: it shows one value and has the gradient of another.
            self._balanced |= name in _SUBTRACTS
            if name in _ADDS or name == "stack":
                self._sums += [(result.grad_fn, (source, shown(asking_line()))) for source in outside]

    def not_finite(self, scaled: bool) -> str:
        """Return `NaN` or `infinite` if a loss had this value; else "". An infinite scaled loss does not count."""
        losses = [float(loss.detach()) for loss in self.losses]
        if any(map(math.isnan, losses)):
            return "NaN"
        return "infinite" if any(map(math.isinf, losses)) and not scaled else ""

    def _sources(self, value: Any) -> set[str]:
        """Return the lines where `value` lost its graph. A float is a multiple of a loss if their ratio has few digits."""
        if isinstance(value, torch.Tensor):
            return self._cut.get(id(value), set())
        for number, lines in self._numbers.items() if isinstance(value, float) else ():
            ratio = value / number
            if math.isclose(ratio, float(f"{ratio:.4g}"), rel_tol=1e-12):
                return lines
        return set()

    def backward(self, tensors: Any, sums: bool) -> None:
        """Record the losses whose backward begins. With `sums`, also record their terms without a graph."""
        plain = [leaf for leaf in leaves(tensors) if type(leaf) is torch.Tensor]
        self.losses += [tensor for tensor in plain if not tensor.dim()]
        for loss in plain if sums and not self._balanced else ():
            summed = {node_number(node) for node in summands(loss.grad_fn)}
            self.lost += [lines for node, lines in self._sums if node_number(node) in summed]


def summands(node: Any) -> Iterator[Any]:
    """Yield `node` and the nodes before it in the graph, up to nodes that are not linear."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or not type(node).__name__.startswith(_LINEAR):
            continue
        yield node
        following = [after for after, _ in node.next_functions if after is not None]
        if len(following) == 1 or not type(node).__name__.startswith(_SINGLE):
            waiting += following
