"""What tests of fused models do with them: watch their operators, copy them."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watched(TorchDispatchMode):
    """Sees operators as who watches them does.

    Attributes:
        names: of those that were called so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    @property
    def own(self) -> list[str]:
        """The names of isotype's own operators."""
        return [name for name in self.names if name.startswith("isotype")]


def copies_of(model: Any) -> tuple[Any, Any]:
    """(a deep copy of a model, one that went through a pickle)"""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return copy.deepcopy(model), torch.load(buffer, weights_only=False)
