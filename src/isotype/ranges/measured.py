"""What is measured: a model whose parameters are here, or read from elsewhere when a module asks for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from isotype.core.errors import UsageError
from isotype.core.memory import free_memory
from isotype.model.walk import blocks_in, kind_of
from isotype.ranges.twin import Read, unwrapped

_ROOM = 1.5
"""Memory of a measurement over that of the largest block's weights."""


@dataclass(frozen=True)
class Measured:
    """What is measured.

    Attributes:
        model: the module; on the meta device where its weights stay on disk.
        source: what it is, in words.
        device: where it is.
        read: how a parameter's values are had; None where they are the parameter's own.
        notes: what there is to say about it.
    """

    model: nn.Module
    source: str
    device: torch.device
    read: Read | None = None
    notes: tuple[str, ...] = ()

    def fitting_dtype(self, device: torch.device) -> torch.dtype:
        """float32, or bfloat16 where the largest block does not fit into the free memory of `device` in float32."""
        free = free_memory(device)
        needed = _ROOM * 4 * max(parts(self.model), default=0)
        return torch.bfloat16 if free is not None and needed > free else torch.float32


def parts(model: nn.Module) -> list[int]:
    """Numbers of weights that are there at the same time: of a block, or of a module outside of blocks."""
    blocks = blocks_in(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    parts = [sum(each.numel() for each in block.parameters()) for block in blocks]
    outside = [module for module in model.modules() if id(module) not in inside]
    return parts + [
        sum(each.numel() for each in module.parameters(recurse=False))
        for module in outside
        if kind_of(module) != "embedding"  # of which only the rows that are looked up are made
    ]


def of_module(model: nn.Module) -> Measured:
    """A model in memory.

    Raises:
        UsageError: its weights have no values here.
    """
    model = unwrapped(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta or hasattr(parameter, "full_tensor"):
            where = "on the meta device" if parameter.is_meta else "sharded over processes"
            raise UsageError.of(
                "this model cannot be measured in memory",
                f"{name} {where}",
                "weights with values",
                "give the checkpoint, by its path or hub id",
            )
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return Measured(model, type(base_of(model)).__name__, device)


def base_of(model: nn.Module) -> nn.Module:
    """The model under PEFT's adapters; one without any itself."""
    base: nn.Module = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    return base
