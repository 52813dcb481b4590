"""The inputs that may affect a step's loss: an operator's result may depend on everything that its operands depend on.

An input that may reach the loss does not always change the loss: `trace/reach` measures that on a small copy. An input
that cannot reach the loss cannot change the loss, in a model of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isotype.compat.torch import storage_of
from isotype.core.operators import leaves, schema_of
from isotype.trace.fake.values import is_data_dependent


class InputReach:
    """For each storage: the inputs of the forward on which the storage's content may depend."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._masks: dict[int, int] = {}  # storage -> a bit for each input
        self._read = 0

    def begin(self, name: str, tensor: torch.Tensor) -> None:
        """Record that `tensor` is the input `name`."""
        self._masks[storage_of(tensor)] = self._mask(tensor) | 1 << len(self._names)
        self._names.append(name)

    def follow(self, func: Any, operands: Sequence[tuple[str, torch.Tensor]], result: Any) -> None:
        """Record that what an operator returns or overwrites depends on every input that one of its operands depends on."""
        sources = {storage_of(tensor) for _, tensor in operands}
        mask = 0
        for storage in sources:
            mask |= self._masks.get(storage, 0)
        if is_data_dependent(func):  # the code may branch on these values
            self._read |= mask
        for tensor in leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = storage_of(tensor)
                self._masks[storage] = mask | (self._masks.get(storage, 0) if storage in sources else 0)
        written = schema_of(func).written
        for name, tensor in operands if written else ():
            if name.partition("[")[0] in written:
                self._masks[storage_of(tensor)] = self._mask(tensor) | mask

    def without_effect(self, loss: torch.Tensor) -> tuple[str, ...]:
        """Return the names of inputs that can change neither the loss nor the code that runs."""
        reached = self._read | self._mask(loss)
        return tuple(name for at, name in enumerate(self._names) if not reached >> at & 1)

    def _mask(self, tensor: torch.Tensor) -> int:
        return self._masks.get(storage_of(tensor), 0)
