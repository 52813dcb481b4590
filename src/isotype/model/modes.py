"""Running a model aside from its training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """In evaluation and without gradients; the model's modes and the random states are afterwards what they were."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), torch.random.fork_rng():
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
