"""What a fault is injected into, and how its places are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isotype.model.walk import Place, places


@dataclass
class Setup:
    """One training step that a fault may change.

    Attributes:
        model: a model of the zoo, in `dtype`.
        batch: what it is called with.
        dtype: the dtype it was built in.
        autocast: autocast dtype around forward and loss, or None.
        scaler: whether a GradScaler scales the loss.
        optimizer: name in `tests.reality.OPTIMIZERS`.
    """

    model: nn.Module
    batch: dict[str, torch.Tensor]
    dtype: torch.dtype
    autocast: torch.dtype | None
    scaler: bool = False
    optimizer: str = "adamw"

    @property
    def other(self) -> torch.dtype:
        """The other 16-bit dtype; bfloat16 for a float32 model."""
        return torch.float16 if self.dtype == torch.bfloat16 else torch.bfloat16

    @property
    def wide(self) -> torch.dtype:
        """float32; bfloat16 for a float32 model."""
        return torch.bfloat16 if self.dtype == torch.float32 else torch.float32


@dataclass(frozen=True)
class Fault:
    """A kind of dtype fault.

    Attributes:
        name: of the kind.
        inject: changes the set-up and says what it did; None where the model has no such place.
        rare: whether only few models have a place for it, so that all of them have to meet it.
    """

    name: str
    inject: Callable[[Setup], str | None]
    rare: bool = False


def middle(found: list[Place]) -> Place | None:
    """The place in the middle of the model; None where there is none."""
    return found[len(found) // 2] if found else None


def head(model: Any) -> nn.Module | None:
    """The output head: the language-model head, or the classifier."""
    found: nn.Module | None = (
        model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    )
    if found is not None:
        return found
    return next((getattr(model, name) for name in ("score", "classifier") if hasattr(model, name)), None)


def linears(model: nn.Module, ending: tuple[str, ...] = ("",)) -> list[Place]:
    """The plain linear layers without the output head, those whose last name is in `ending`."""
    last = head(model)
    return [
        place
        for place in places(model)
        if type(place.module) is nn.Linear
        and place.module is not last
        and (ending == ("",) or place.name.rpartition(".")[2] in ending)
    ]


def norms(model: nn.Module) -> list[Place]:
    """The norms that have a weight."""
    return [
        place
        for place in places(model)
        if place.kind == "norm" and isinstance(getattr(place.module, "weight", None), nn.Parameter)
    ]


def float_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Every float buffer: its full name, its module, its own name and itself."""
    for place in places(model):
        for name, buffer in place.module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                yield f"{place.name}.{name}", place.module, name, buffer


def cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Cast a parameter where it lies: tied uses of it change with it."""
    parameter.data = parameter.data.to(dtype)
