"""Code that names the simulated device, on a machine that may not have it.

The twin's tensors are on the CPU whatever device is simulated. Where the model's code or the loss names the device,
the CPU stands for it: `x.to("cuda")`, `torch.zeros(3, device="cuda")`, `with torch.autocast("cuda")`. Without this
torch would refuse the first two on a machine without a GPU, and switch the third off.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch

_DEVICE_TYPES = {"rocm": "cuda"}
_BY_DEVICE = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
# What a loop asks its device between operators: nothing is there to wait for or to be counted.
_QUIET: Mapping[str, Any] = {
    "synchronize": None,
    "empty_cache": None,
    "ipc_collect": None,
    "reset_peak_memory_stats": None,
    "current_device": 0,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
}
_MOVES = ("cuda", "xpu", "pin_memory")


def device_type(kind: str) -> str:
    """The type of torch's devices of this kind of profile."""
    return _DEVICE_TYPES.get(kind, kind)


@contextlib.contextmanager
def cpu_stands_for(kind: str) -> Iterator[None]:
    """Inside, the CPU's autocast answers for the simulated device's, with that device's default dtype."""
    simulated = device_type(kind)
    if simulated == "cpu":
        yield
        return
    default, before = torch.get_autocast_dtype(simulated), torch.get_autocast_dtype("cpu")
    changes: list[tuple[Any, str, Any]] = [
        (torch, name, _renamed(getattr(torch, name), simulated)) for name in _BY_DEVICE
    ]
    changes.append((torch.autocast, "__init__", _renamed(torch.autocast.__init__, simulated)))
    backend = getattr(torch, simulated)
    changes += [(backend, name, _quiet(result)) for name, result in _QUIET.items() if hasattr(backend, name)]
    with contextlib.ExitStack() as stack:
        for owner, name, new in changes:
            stack.callback(setattr, owner, name, inspect.getattr_static(owner, name))
            setattr(owner, name, new)
        torch.set_autocast_dtype("cpu", default)
        stack.callback(torch.set_autocast_dtype, "cpu", before)
        yield


def _renamed(function: Callable[..., Any], simulated: str) -> Callable[..., Any]:
    """`function` with the CPU in place of the simulated device; without a device torch means CUDA."""
    asks = function is torch.is_autocast_enabled

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if asks and not args and not kwargs:
            args = ("cuda",)
        named = {name: "cpu" if value == simulated else value for name, value in kwargs.items()}
        return function(*("cpu" if arg == simulated else arg for arg in args), **named)

    return call


def _quiet(result: Any) -> Callable[..., Any]:
    return lambda *_, **__: result


def on_cpu(func: Any, args: Any, kwargs: Any, named: re.Pattern[str]) -> tuple[Any, Any, Any]:
    """The call of a torch function with the CPU in place of the devices whose names match `named`."""
    if func in _CALLS_TO_MOVE:
        return torch.Tensor.cpu, args[:1], {}
    if any(type(arg) in (str, torch.device) for arg in args):
        args = tuple(_cpu_for(arg, named) for arg in args)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": _cpu_for(kwargs["device"], named)}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return func, args, kwargs


_CALLS_TO_MOVE = frozenset(getattr(torch.Tensor, name) for name in _MOVES)


def _cpu_for(value: Any, named: re.Pattern[str]) -> Any:
    if type(value) in (str, torch.device) and named.fullmatch(str(value)):
        return torch.device("cpu")
    return value


def names_of(kind: str) -> re.Pattern[str]:
    """What the simulated device is called in code, with or without its number."""
    return re.compile(rf"{re.escape(device_type(kind))}(:\d+)?")
