"""Running a model aside from its training."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.core.random_states import random_states_kept

_CONTAINERS = (dict, OrderedDict, list, set)
_PLACED = ("_parameters", "_modules")
"""What a sharded model takes out and puts in as it runs, in step with what its hooks remember."""


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """In evaluation and without gradients; the model and the random states are afterwards what they were.

    Put back are modes, attributes of modules and what containers among them hold, and the values of buffers: routers keep the
    capacity of the first batch they see, positions the longest length, caches the last keys.
    """
    restorers = [restore for module in model.modules() for restore in _restorers(module)]
    try:
        with torch.no_grad(), torch.random.fork_rng(), random_states_kept():
            model.eval()
            yield
    finally:
        with torch.no_grad():
            for restore in restorers:
                restore()


def _restorers(module: nn.Module) -> Iterator[Callable[[], None]]:
    attributes = vars(module)
    for name, value in attributes.items():
        if type(value) in _CONTAINERS and name not in _PLACED:
            yield _restorer(value)
    for buffer in module._buffers.values():
        if buffer is not None and (torch.is_inference_mode_enabled() or not buffer.is_inference()):
            yield partial(buffer.copy_, buffer.clone())
    yield _restorer(attributes)


def _restorer(container: Any) -> Callable[[], None]:
    saved = container.copy()

    def restore() -> None:
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(saved)

    return restore
