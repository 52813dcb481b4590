"""Fake kernels, run once per kind of operands: their results are cached as shapes, strides and dtypes.

`FakeTensorMode` has a cache too, but a look-up takes a third of a millisecond; a step has thousands of
operators, and is traced again for every fix. Cached is what torch allows (`_validate_cache_key` in
torch/_subclasses/fake_tensor.py, 2.13), and views by the storage they share.
"""

from __future__ import annotations

from typing import Any

import torch

from isotype.compat.torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    dispatch_keys,
    fake_of,
    operator_schema,
    storage_key,
    storage_of,
    tree_flatten,
    tree_unflatten,
    without_dispatch,
    without_modes,
)
from isotype.core.errors import first_line

_CPU = torch.device("cpu")
_BUILT_IN = ("aten", "prims")
_UNSTEADY = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
)
# They change a tensor's metadata without the tag for it.
_RESHAPED = frozenset({"aten::resize_", "aten::set_", "aten::resize_as_", "aten::lift_fresh", "aten::lift"})
_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.layout,
        torch.memory_format,
        torch.device,
    }
)
_MOST = 1 << 16
# Shapes and strides select their kernel (`bmm_out_or_baddbmm_` in aten/src/ATen/native/LinearAlgebra.cpp),
# and each kernel has its own error for mixed dtypes.
_REFUSES_BY_SHAPE = frozenset(f"aten::{name}" for name in ("bmm", "baddbmm", "baddbmm_"))
_LARGEST = 1 << 24

# Entries have numbers only, no tensors: they outlive their traces.
_KNOWN: dict[Any, Any] = {}
_STEADY: dict[Any, bool] = {}


class Kernels:
    """Runs operators on the fakes of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        with mode:
            template = torch.empty(())
        self._state = dict(template.__dict__)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of `func`: cached for operands of the same kind, else from its fake kernel."""
        tensors: list[FakeTensor] = []
        key = self._key(func, args, kwargs, tensors)
        if key is None:
            return func(*args, **kwargs)
        entry = _KNOWN.get(key)
        if entry is None:
            result = func(*args, **kwargs)
            if len(_KNOWN) >= _MOST:
                _KNOWN.clear()
            _KNOWN[key] = self._entry(result, tensors)
            return result
        kind, entry = entry
        if kind is None:
            return func(*args, **kwargs)
        return (
            kind(self._made(each, tensors) for each in entry)
            if kind is not _One
            else self._made(entry, tensors)
        )

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
        """Return all that determines a fake kernel's result; None if it must not be cached."""
        steady = _STEADY.get(func)
        if steady is None:
            steady = _STEADY[func] = _is_steady(func)
        if not steady or torch.is_inference_mode_enabled():
            return None
        parts: list[Any] = [func, torch.get_default_dtype()]
        if not self._describe(args, parts, tensors):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not self._describe((value,), parts, tensors):
                return None
        return tuple(parts)

    def _describe(self, values: Any, parts: list[Any], tensors: list[FakeTensor]) -> bool:
        for value in values:
            if isinstance(value, FakeTensor):
                if not self._is_plain(value):
                    return False
                parts += (value.dtype, value.shape, value.stride(), value.storage_offset())
                tensors.append(value)
            elif type(value) in _PLAIN:
                parts += (type(value), value)
            elif isinstance(value, (list, tuple)):
                parts += (type(value), len(value))
                if not self._describe(value, parts, tensors):
                    return False
            else:
                return False
        return True

    def _is_plain(self, tensor: FakeTensor) -> bool:
        """Return whether a tensor has only shape, strides and dtype: no known value, on the CPU, of this mode."""
        return (
            tensor.fake_mode is self._mode
            and tensor.constant is None
            and tensor.fake_device == _CPU
            and tensor.layout == torch.strided
            and not tensor.dtype.is_complex
            and not tensor.is_neg()
        )

    # ------------------------------------------------------------------------------------------- what is remembered

    def _entry(self, result: Any, tensors: list[FakeTensor]) -> Any:
        """Return how to recreate `result`: (its type, recipe of each part); (None, None) if impossible."""
        parts = result if isinstance(result, (tuple, list)) else (result,)
        if type(result) not in (tuple, list) and parts is result:
            return None, None  # another structure
        storages = {storage_of(tensor): at for at, tensor in enumerate(tensors)}
        seen: set[int] = set()
        pieces = []
        for part in parts:
            piece = self._part(part, tensors, storages, seen)
            if piece is None:
                return None, None
            pieces.append(piece)
        return (type(result), tuple(pieces)) if parts is result else (_One, pieces[0])

    def _part(self, part: Any, tensors: list[FakeTensor], storages: dict[int, int], seen: set[int]) -> Any:
        if part is None:
            return ("none",)
        if not isinstance(part, FakeTensor) or not self._is_plain(part):
            return None
        for at, tensor in enumerate(tensors):
            if part is tensor:
                return ("same", at)
        if part.requires_grad:
            return None
        storage = part.untyped_storage()
        shared = storages.get(storage_key(storage))
        how = (
            "view" if shared is not None else "new",
            shared,
            tuple(part.shape),
            part.stride(),
            part.dtype,
            part.storage_offset(),
        )
        copy = self._made(how, tensors)
        alike = dispatch_keys(copy) == dispatch_keys(part)
        if shared is None:
            # Larger memory than its shape needs, or shared with another result.
            alike = (
                alike
                and storage.nbytes() == copy.untyped_storage().nbytes()
                and storage_key(storage) not in seen
            )
            seen.add(storage_key(storage))
        return how if alike else None

    def _made(self, how: Any, tensors: list[FakeTensor]) -> Any:
        kind = how[0]
        if kind == "same":
            return tensors[how[1]]
        if kind == "none":
            return None
        _, shared, shape, stride, dtype, offset = how
        with without_dispatch():
            memory = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if shared is not None:
                memory.set_(tensors[shared].untyped_storage(), offset, shape, stride)
        fake = fake_of(memory, _CPU)
        fake.__dict__.update(self._state)
        return fake


class _One:
    """Marks a result of one tensor instead of several."""


def _is_steady(func: Any) -> bool:
    """Return whether an operator's results have the same kind for operands of the same kind."""
    return (
        isinstance(func, OpOverload)
        and func.namespace in _BUILT_IN
        and not _UNSTEADY.intersection(func.tags)
        and operator_schema(func).name not in _RESHAPED
    )


def refusal(func: Any, args: Any, kwargs: Any) -> str | None:
    """Return this machine's error for a call with mixed dtypes if that depends on shapes and strides; else
    None.

    The call is real, on uninitialized memory: a kernel raises before it reads. None if an operand has more
    than `_LARGEST` elements.
    """
    operands, spec = tree_flatten((args, kwargs))
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    if operator_schema(func).name not in _REFUSES_BY_SHAPE or any(
        each.numel() > _LARGEST for each in tensors
    ):
        return None
    with without_modes():
        real = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)
            if isinstance(each, torch.Tensor)
            else each
            for each in operands
        ]
        args, kwargs = tree_unflatten(real, spec)
        try:
            func(*args, **kwargs)
        except RuntimeError as error:
            return first_line(error)
    return None
