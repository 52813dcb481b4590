"""Lets `module.to(dtype)` set the data of fake parameters, as it does for real parameters, and notes casts of weights.

torch's `Module._apply` (torch/nn/modules/module.py, torch 2.13) swaps a fake parameter with the cast tensor. The swap
fails if a recorded operator or a later backward uses the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isotype.compat.replaced import Replacements, replace, replaced
from isotype.compat.torch import BUFFERS, PARAMETERS, FakeTensor

_SWAP: Any = nn.Module._apply


@contextmanager
def casts_in_place() -> Iterator[None]:
    """In the `with` block, modules with fake parameters are cast in place."""
    with replaced(nn.Module, "_apply", _apply):
        yield


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
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


@contextmanager
def around_weights(
    registered: Callable[[nn.Module, str, torch.dtype | None], None],
    assigned: Callable[[torch.Tensor, torch.dtype], None],
) -> Iterator[None]:
    """In the `with` block, call functions for weights that modules get and for weights that are cast.

    Args:
        registered: (module, name, dtype before) after a module got or cast a parameter or buffer; without one before, None.
        assigned: (tensor, dtype before) after an assignment to `tensor.data` has changed the dtype.
    """

    def registering(original: Any, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
        before = weights_in(module).get(name)
        original(module, name, *args, **kwargs)
        if name in weights_in(module):
            registered(module, name, None if before is None else before.dtype)

    def applying(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = {name: tensor.dtype for name, tensor in weights_in(module).items()}
        result = original(module, *args, **kwargs)
        for name in weights_in(module):
            registered(module, name, before.get(name))
        return result

    def set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
        before = tensor.dtype
        data.__set__(tensor, new)
        if tensor.dtype != before:
            assigned(tensor, before)

    data: Any = torch.Tensor.data
    with Replacements() as replaced:
        replaced.wrap(nn.Module, "register_parameter", registering)
        replaced.wrap(nn.Module, "register_buffer", registering)
        replaced.wrap(nn.Module, "_apply", applying)
        replaced.callback(replace(torch.Tensor, "data", property(data.__get__, set_data, doc=data.__doc__)))
        yield


def weights_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module itself by name."""
    weights = {**module.__dict__.get(PARAMETERS, {}), **module.__dict__.get(BUFFERS, {})}
    return {name: tensor for name, tensor in weights.items() if tensor is not None}
