"""The device that fake tensors simulate. Code that chooses a kernel depends on this device.

All fake tensors are on the CPU. Their `FakeTensorMode` has attributes with the properties of the simulated device.
"""

import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from isotype.compat.torch import FakeTensor, FakeTensorMode, in_backward
from isotype.compat.torch_device import device_type
from isotype.core.dtypes import HALVES
from isotype.core.operators import operator_name
from isotype.precision.devices.profile import DeviceProfile, this_cpu_emulates

VALUE = "_isotype_value"
"""Name of the attribute that contains the known value of a fake tensor."""


class OtherThreadError(RuntimeError):
    """An operator runs in another thread than the trace, so the trace cannot record the operator."""


class SimulatedMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The `FakeTensorMode` of fake tensors that simulate one device.

    Attributes:
        device_type: torch's type of the simulated device, such as "cuda"; "" without a profile.
        gpu_memory: bytes of the simulated GPU's memory; None for a CPU or MPS, or if the size is unknown.
        repeats: identity of a fake weight -> how many equal weights of the model it represents.
        native: dtypes that the simulated device multiplies in hardware; empty without a profile.
        thread: identifier of the only thread that may run operators; None before a trace.
        threaded: the error of the first operator in another thread, because that thread may have ignored the error; None
            without one.
    """

    def __init__(self, profile: DeviceProfile | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device_type = "" if profile is None else device_type(profile.kind)
        gpu = profile if self.device_type in ("cuda", "xpu") else None
        self.repeats: Mapping[int, int] = {}
        self.native = frozenset[torch.dtype]() if profile is None else profile.native
        self.gpu_memory = None if gpu is None else gpu.memory_bytes
        self.thread: int | None = None
        self.threaded: OtherThreadError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.thread not in (None, threading.get_ident()) and not in_backward():
            what = f"{operator_name(func)} runs in another thread, which a trace cannot record"
            self.threaded = self.threaded or OtherThreadError(what)
            raise self.threaded
        return super().__torch_dispatch__(func, types, args, kwargs)


def device_type_of(x: torch.Tensor) -> str:
    """Return the type of a tensor's device, real or simulated; "" for a fake tensor that simulates no device."""
    mode = x.fake_mode if isinstance(x, FakeTensor) else None
    return mode.device_type if isinstance(mode, SimulatedMode) else x.device.type


def is_native(x: torch.Tensor) -> bool:
    """Return True if the simulated device of a fake tensor multiplies natively in its dtype. Return True for other tensors."""
    mode = _mode_of(x)
    return mode is None or x.dtype in mode.native


def gpu_memory(x: torch.Tensor) -> int | None:
    """Return the bytes of the memory of a tensor's GPU, real or simulated; None for a CPU or MPS, or if the size is unknown."""
    mode = _mode_of(x)
    return _memory_of(x.device) if mode is None else mode.gpu_memory


def represented(weight: torch.Tensor) -> int:
    """Return the number of equal weights of the model that a fake weight represents; 1 for a real weight."""
    mode = _mode_of(weight)
    return 1 if mode is None else mode.repeats.get(id(weight), 1)


def _mode_of(x: torch.Tensor) -> SimulatedMode | None:
    mode = x.fake_mode if isinstance(x, FakeTensor) else None
    return mode if isinstance(mode, SimulatedMode) else None


@cache
def _memory_of(device: torch.device) -> int | None:
    if device.type in ("cpu", "meta"):
        return None
    memory_info = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if memory_info is None else int(memory_info(device)[1])


def working_dtype(compute: torch.dtype, x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to multiply `x`: `compute`, or float32 if the CPU emulates `compute`.

    CPU kernels that emulate `compute` sum in float32 and round once. A float32 matmul gives the same result faster.
    """
    if x.device.type != "cpu":
        return compute
    mode = _mode_of(x)
    if mode is None:
        return torch.float32 if this_cpu_emulates(compute) else compute
    slow = mode.device_type == "cpu" and compute in HALVES and compute not in mode.native
    return torch.float32 if slow else compute


def has_value(fake: torch.Tensor) -> bool:
    """Return True if the values of a fake tensor are known. A trace knows the values of small tensors that depend on no weight."""
    return hasattr(fake, VALUE)
