"""Build a model without initializing its weights; existing values are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from isotype.compat.torch import parsed_to

# What layers and transformers' `init_weights` end in; each writes into its first argument and returns it.
_DRAWN = frozenset(
    {
        *(nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_),
        *(torch.Tensor.uniform_, torch.Tensor.normal_),
    }
)


class NoDraws(TorchFunctionMode):
    """Mode that skips random initialization on the meta device, which takes half a second for a thousand layers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWN:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


class KeepsValues(TorchFunctionMode):
    """Mode in which a tensor with values is not moved to the meta device; its dtype may change.

    PEFT initializes an adapter and then moves it to the device of its base layer.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and not args[0].is_meta:
            device, dtype, *_ = parsed_to(
                *args[1:], **{name: value for name, value in kwargs.items() if name != "copy"}
            )
            if device is not None and device.type == "meta":
                return args[0] if dtype is None else args[0].to(dtype)
        return func(*args, **kwargs)
