"""Modules that the batches of several processes do not all run: FSDP gathers the weights of those that run, together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from isotype.trace.reach.batch import Batch


def skipped_modules(model: nn.Module, batches: Sequence[Batch]) -> tuple[str, ...]:
    """Return the outermost modules with weights that some batches run and others do not.

    Experts and other modules inside of a repeated layer are left out: the layer's weights are gathered together.
    """
    if len(batches) < 2:
        return ()
    ran = [_ran(model, batch) for batch in batches]
    partly = set().union(*ran).difference(set(ran[0]).intersection(*ran))
    outermost = (name for name in partly if not any(name.startswith(f"{other}.") for other in partly))
    return tuple(sorted(name for name in outermost if not _inside_of_a_layer(name)))


def _ran(model: nn.Module, batch: Batch) -> set[str]:
    """Return the modules with weights that a forward over `batch` calls."""
    called: set[str] = set()

    def note(name: str) -> Any:
        return lambda module, args: called.add(name)

    hooks = [
        module.register_forward_pre_hook(note(name))
        for name, module in model.named_modules()
        if next(module.parameters(), None) is not None
    ]
    try:
        with torch.no_grad():
            model(**batch.arguments())
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _inside_of_a_layer(name: str) -> bool:
    return any(part.isdigit() for part in name.split(".")[:-1])
