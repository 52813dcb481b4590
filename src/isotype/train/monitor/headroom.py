"""How much of float16's range the outputs of a model's blocks use while it trains."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from isotype.core.dtypes import dtype_name
from isotype.model.walk import blocks_in
from isotype.report.run.headroom import Headroom, HeadroomSample

_EVERY = 50
"""Steps between two looks; in short runs fewer, so that there are some twenty."""


class HeadroomMeter:
    """Samples the largest magnitude of every block's output in the first micro-batch of some steps.

    Between two looks nothing of it is on the model.

    Args:
        model: the trainer's.
        steps: optimizer steps of the run.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        self._blocks = {names[id(block)]: block for block in blocks_in(model, fewest=2)}
        self._every = min(_EVERY, max(1, steps // 20))
        self._handles: dict[str, Any] = {}
        self._seen: dict[str, torch.Tensor] = {}
        self._samples: list[HeadroomSample] = []
        self._dtype = "float16"

    def begin_step(self, step: int) -> None:
        """Step `step`, counted from 1, begins: look at it if it is its turn."""
        self._leave()
        if (step - 1) % self._every == 0:
            self._handles = {
                name: block.register_forward_hook(self._looking(name)) for name, block in self._blocks.items()
            }

    def end_step(self, step: int) -> None:
        """Read what was seen; the one time that it is waited for."""
        self._leave()
        if self._seen:
            self._blocks = {name: block for name, block in self._blocks.items() if name in self._seen}
            largest = torch.stack([self._seen[name].float() for name in self._blocks]).tolist()
            # NaN follows an overflow.
            values = (math.inf if math.isnan(value) else value for value in largest)
            self._samples.append(HeadroomSample(step, tuple(values)))
            self._seen.clear()

    def record(self) -> Headroom | None:
        """The samples so far; None for a model without blocks, or before the first look."""
        if not self._samples:
            return None
        return Headroom(tuple(self._blocks), self._dtype, tuple(self._samples))

    def _looking(self, name: str) -> Any:
        def look(block: nn.Module, args: Any, result: Any) -> None:
            if block is not self._blocks.get(name):
                return  # the preflight's copy of the model
            handle = self._handles.pop(name, None)
            if handle is None or not block.training:
                return
            handle.remove()
            value = result[0] if isinstance(result, (tuple, list)) else result
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._dtype = dtype_name(value.dtype)
                self._seen[name] = torch.linalg.vector_norm(value.detach(), torch.inf)

        return look

    def _leave(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
