"""Lets `module.to(dtype)` set the data of fake parameters, as it does for real parameters, and notes casts of weights.

torch's `Module._apply` (torch/nn/modules/module.py, torch 2.13) swaps a fake parameter with the cast tensor. The swap
fails if a recorded operator or a later backward uses the parameter.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.compat.replaced import Replacements, replace, replaced
from isotype.compat.torch import BUFFERS, PARAMETERS, FakeTensor

_SWAP: Any = nn.Module._apply


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


casts_in_place = partial(replaced, nn.Module, "_apply", _apply)
"""Context manager: in the `with` block, modules with fake parameters are cast in place."""


@contextmanager
def around_weights(
    registered: Callable[[nn.Module, str, torch.dtype | None], None],
    assigned: Callable[[torch.Tensor, torch.dtype], None],
    copied: Callable[[nn.Module, nn.Module], None],
) -> Iterator[None]:
    """In the `with` block, call functions for weights that modules get and for weights that are cast or copied.

    Args:
        registered: (module, name, dtype before) for each weight after a module got or cast one; without one before, None.
        assigned: (tensor, dtype before) after an assignment to `tensor.data` has changed the dtype.
        copied: (module, its copy) after `copy.deepcopy`, also for each module inside of the copied module.
    """

    def setting(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
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

    def copying(original: Any, value: Any, *memo: Any, **kwargs: Any) -> Any:
        result = original(value, *memo, **kwargs)
        # Calls with a memo copy a part of another object: its modules may not be complete yet.
        if isinstance(value, nn.Module) and not memo and not kwargs:
            inside = dict(value.named_modules())
            for name, module in result.named_modules():
                if name in inside:
                    copied(inside[name], module)
        return result

    data: Any = torch.Tensor.data
    with Replacements() as replaced:
        for name in ("register_parameter", "register_buffer", "_apply"):
            replaced.wrap(nn.Module, name, setting)
        replaced.wrap(copy, "deepcopy", copying)
        replaced.callback(replace(torch.Tensor, "data", property(data.__get__, set_data, doc=data.__doc__)))
        yield


def weights_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module itself by name."""
    weights = {**module.__dict__.get(PARAMETERS, {}), **module.__dict__.get(BUFFERS, {})}
    return {name: tensor for name, tensor in weights.items() if tensor is not None}
