"""Effects above the dispatcher: another device's autocast, and errors of composite functions.

Autocast acts where Python calls a torch function, so that autograd records its casts. On a machine without a
GPU `torch.autocast("cuda")` disables itself, and the function lists differ between devices. The CPU's
autocast covers what all devices share (matmuls and convolutions); this mode adds the simulated device's casts
and undoes those of a CPU only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from isotype.compat.torch import cudnn_is_on
from isotype.compat.torch_device import cpu_stands_for, names_of, on_cpu
from isotype.core.dtypes import dtype_name
from isotype.core.names import format_bytes
from isotype.precision.devices.attention import (
    AttentionCall,
    attention_kernel,
    needs_repeated_heads,
)
from isotype.precision.devices.profile import DeviceProfile
from isotype.trace.fake.arguments import map_leaves
from isotype.trace.fake.recorder import FakeRecorder
from isotype.trace.fake.values import HALVES
from isotype.trace.taken import DTYPE

# Python functions that call a listed one.
_ALIASES = {
    "cross_entropy": "nll_loss",
    "normalize": "norm",
    "__pow__": "pow",
    "__rpow__": "pow",
    "__matmul__": "matmul",
}
_FROM_LISTS = (torch.tensor, torch.as_tensor)


class Functions(TorchFunctionMode):
    """Passes the running function to the recorder, applies a device's autocast lists, catches errors.

    Args:
        recorder: of the step.
        kind: kind of the simulated device (`cpu`, `cuda`, …).
        profile: of the device, for queries of its properties.

    Attributes:
        attention: runs the device's attention kernel; None without a profile.
    """

    def __init__(self, recorder: FakeRecorder, kind: str, profile: DeviceProfile | None = None) -> None:
        super().__init__()
        self._recorder = recorder
        self._kind, self._foreign, self._profile = kind, kind != "cpu", profile
        self._names = names_of(kind)
        self._stand_in = contextlib.ExitStack()
        self.attention = None if profile is None else Attention(profile)
        if self._foreign:
            from isotype.contracts.contract import autocast_lists

            self._lists, self._cpu = autocast_lists(kind), autocast_lists("cpu")

    def __enter__(self) -> Functions:
        self._stand_in.enter_context(cpu_stands_for(self._kind, self._profile))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stand_in.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._recorder.swapped(args), self._recorder.swapped(kwargs or {})
        if getattr(func, "__self__", None) is DTYPE:
            self._recorder.reads.note(self._recorder.origin(args[0]))
            return func(*args)
        if func is torch.Tensor.numpy:
            return self._recorder.array(args[0])
        if func is torch.Tensor.tolist:
            return self._recorder.listed(args[0])
        if func is torch.Tensor.__format__ and args[0].dim() == 0:
            return format(args[0].item(), *args[1:])  # only a plain tensor is formatted as its number
        if func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor):
            args = (args[0], self._within(args[0], args[1]))
        if self._foreign:
            func, args, kwargs = on_cpu(func, args, kwargs, self._names)
        if func in _FROM_LISTS and args:
            args = (self._numbers(args[0]), *args[1:])
        name, recorder = name_of(func), self._recorder
        before = recorder.function, recorder.autocast, recorder.like
        cast = torch.is_autocast_enabled("cpu")
        recorder.like = recorder.cast_origin(name, args, kwargs)
        recorder.function, recorder.autocast = name, torch.get_autocast_dtype("cpu") if cast else None
        try:
            if self._foreign and cast:
                return self._autocast(func, _ALIASES.get(name, name), args, kwargs)
            return self._call(func, args, kwargs)
        finally:
            recorder.function, recorder.autocast, recorder.like = before

    def _within(self, tensor: torch.Tensor, index: torch.Tensor) -> Any:
        """Return an index inside `tensor`: of experts assumed to be hit, the last may be out of range."""
        known = self._recorder.values.of(index)
        if known is None or known.dim() or known.dtype in (torch.bool, torch.uint8) or not tensor.dim():
            return index
        number, rows = int(known), tensor.shape[0]
        return index if -rows <= number < rows else number % rows

    def _numbers(self, value: Any) -> Any:
        """Return a list with numbers for tensors, since `torch.tensor` would read their memory."""
        if isinstance(value, (list, tuple)):
            return [
                self._recorder.listed(v) if isinstance(v, torch.Tensor) else self._numbers(v) for v in value
            ]
        return value

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.attention is None:
            return self._converted_if_refused(func, args, kwargs)
        with self.attention.as_on_device(func, args, kwargs, self._recorder.autocast):
            return self._converted_if_refused(func, args, kwargs)

    def _converted_if_refused(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError) as error:
            if name_of(func) in ("backward", "grad"):
                raise  # a graph cannot be traversed twice
            # The recorder has converted operands that operators refuse; this error was raised above them.
            target = self._recorder.composite(func, args, kwargs, error)
            if target is None:
                raise
            return func(*_cast(args, target, True), **_cast(kwargs, target, True))

    def _autocast(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        lists = self._lists
        if name in lists.banned:
            self._recorder.banned(name, args, kwargs)
            with torch.autocast("cpu", enabled=False):
                return self._call(func, _widen(args, torch.float32), _widen(kwargs, torch.float32))
        if name in lists.float32 or (name in lists.float32_opt and kwargs.get("dtype") is None):
            args, kwargs = _widen(args, torch.float32), _widen(kwargs, torch.float32)
            with torch.autocast("cpu", enabled=False):
                return self._call(func, args, kwargs)
        if name in lists.promote:
            widest = _widest((args, kwargs))
            return self._call(func, _widen(args, widest), _widen(kwargs, widest))
        if name in lists.lower and name not in self._cpu.lower:
            low = torch.get_autocast_dtype("cpu")
            return self._call(func, _cast(args, low), _cast(kwargs, low))
        if name in self._cpu.float32 or name in self._cpu.promote:
            with torch.autocast("cpu", enabled=False):
                return self._call(func, args, kwargs)
        return self._call(func, args, kwargs)


def name_of(func: Any) -> str:
    """Return Python's name of a function."""
    return str(getattr(func, "__name__", ""))


def _cast(values: Any, dtype: torch.dtype, doubles: bool = False) -> Any:
    """Return floats in `dtype`; float64 ones only with `doubles`: autocast skips them."""

    def cast(leaf: Any) -> Any:
        floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        floats = floats and (doubles or leaf.dtype != torch.float64)
        return leaf.to(dtype) if floats and leaf.dtype != dtype else leaf

    return map_leaves(cast, values)


def _widen(values: Any, dtype: torch.dtype) -> Any:
    def widen(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in HALVES else leaf

    return map_leaves(widen, values)


def _widest(values: Any) -> torch.dtype:
    floats: list[torch.dtype] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            floats.append(leaf.dtype)
        return leaf

    map_leaves(note, values)
    wide = any(dtype == torch.float32 for dtype in floats) or len(set(floats)) > 1
    return torch.float32 if wide else (floats[0] if floats else torch.float32)


_LEAST_SHARE, _LEAST = 0.01, 1 << 20
"""Minimum scores of a layer for a note: a share of the step's peak, and bytes."""


class Attention:
    """Runs attention by plain operators if the device has no fused kernel for a call, and records its scores."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile, self._cudnn = profile, cudnn_is_on()
        self._scores: dict[tuple[torch.dtype, bool], int] = {}

    @contextmanager
    def as_on_device(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], autocast: torch.dtype | None
    ) -> Iterator[None]:
        """Wrap a call of a torch function; changes only attention."""
        call = None if func is not scaled_dot_product_attention else _call_of(args, kwargs, autocast)
        if call is None or attention_kernel(self._profile, call[0], cudnn=self._cudnn) != "math":
            yield
            return
        described, scores = call
        key = described.dtype, described.heads != described.key_heads
        self._scores[key] = max(self._scores.get(key, 0), scores)
        with attention.sdpa_kernel(SDPBackend.MATH):
            yield

    def notes(self, peak: int) -> Iterator[str]:
        """A line for each kind of calls that no fused kernel of the device takes and whose scores count beside the step's peak in bytes."""
        for (dtype, grouped), scores in self._scores.items():
            if scores < max(_LEAST, _LEAST_SHARE * peak):
                continue
            title, name = self._profile.title, dtype_name(dtype)
            how = f"{format_bytes(scores)} of scores are written out for a layer's attention: on {title} no fused kernel takes"
            if grouped and needs_repeated_heads(self._profile, dtype):
                yield f"{how} grouped heads in {name}; where layers are fused (--fuse, isotype.fuse), keys and values are repeated instead"
            else:
                yield f"{how} these heads in {name}"


def _call_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], autocast: torch.dtype | None
) -> tuple[AttentionCall, int] | None:
    """Return (call, bytes of its scores in plain operators); None for shapes that torch refuses."""
    named: dict[str, Any] = {
        **dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)),
        **kwargs,
    }
    query, key, value = (named.get(name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or {query.dim(), key.dim(), value.dim()} != {4}:
        return None
    dtype: torch.dtype = query.dtype if autocast is None or query.dtype == torch.float64 else autocast
    sizes = query.shape[-1], key.shape[-1], value.shape[-1]
    call = AttentionCall(dtype, query.shape[1], key.shape[1], sizes, named.get("attn_mask") is not None)
    width = max(dtype.itemsize, torch.float32.itemsize)
    return call, query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * width
