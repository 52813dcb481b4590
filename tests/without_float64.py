"""A tensor that lies on a device without float64, as Apple's GPUs and Intel's Arc: what wants it of one has to bring it to the CPU first."""

from __future__ import annotations

from typing import Any

import torch


class WithoutFloat64(torch.Tensor):
    """Computes on the CPU as any tensor; refuses to become one of float64, until `cpu()` makes it a plain one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = (*args, *(kwargs or {}).values())
        if func is torch.Tensor.double or any(each is torch.float64 for each in asked):
            raise TypeError("the device has no float64")
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.cpu:
                return args[0].clone().as_subclass(torch.Tensor)
        return super().__torch_function__(func, types, args, kwargs)
