"""Lets `module.to(dtype)` set the data of fake parameters, as it does for real parameters.

torch's `Module._apply` (torch/nn/modules/module.py, torch 2.13) swaps a fake parameter with the cast tensor. The swap
fails if a recorded operator or a later backward uses the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isotype.compat.replaced import replaced
from isotype.compat.torch import FakeTensor

_SWAP: Any = nn.Module._apply


@contextmanager
def casts_in_place() -> Iterator[None]:
    """In the `with` block, modules with fake parameters are cast in place."""
    with replaced(nn.Module, "_apply", _apply):
        yield


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    parameters = {name: held for name, held in module._parameters.items() if held is not None}
    if not all(isinstance(parameter, FakeTensor) for parameter in parameters.values()):
        return _SWAP(module, fn, recurse)
    for child in module.children() if recurse else ():
        child._apply(fn)  # type: ignore[no-untyped-call]
    for name, parameter in parameters.items():
        with torch.no_grad():
            if (new := fn(parameter)).device != parameter.device:
                module._parameters[name] = nn.Parameter(new, parameter.requires_grad)
                continue
            parameter.data = new
            if parameter.grad is not None:
                parameter.grad.data = fn(parameter.grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else fn(buffer)
    return module
