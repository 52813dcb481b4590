"""A cache of the results of fake kernels: their shapes, strides and dtypes, by the operands' shapes, strides and dtypes.

A step has thousands of operators and is traced again for every fix, and the cache of `FakeTensorMode` takes a third of
a millisecond for each look-up. This cache contains the results that torch would cache (`_validate_cache_key` in
torch/_subclasses/fake_tensor.py, 2.13), and also views, which share the storage of an operand.
"""

from __future__ import annotations

from functools import cache
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
    tree_leaves,
    without_dispatch,
    without_modes,
)
from isotype.core.errors import first_line
from isotype.trace.fake.arguments import map_leaves

_CPU = torch.device("cpu")
_BUILT_IN = ("aten", "prims")
_UNSTEADY = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
)
# Operators that change a tensor's metadata without the tag `inplace_view`.
_RESHAPED = frozenset({"aten::resize_", "aten::set_", "aten::resize_as_", "aten::lift_fresh", "aten::lift"})
_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device}
)
_MOST = 1 << 16
# Operators whose kernel is selected by shapes and strides (`bmm_out_or_baddbmm_` in
# aten/src/ATen/native/LinearAlgebra.cpp); each kernel has its own error for mixed dtypes.
_REFUSES_BY_SHAPE = frozenset(f"aten::{name}" for name in ("bmm", "baddbmm", "baddbmm_"))
_LARGEST = 1 << 24

# Entries contain numbers and no tensors, because they are kept after their trace.
_KNOWN: dict[Any, Any] = {}


class Kernels:
    """Runs operators on the fake tensors of one `FakeTensorMode`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        with mode:
            template = torch.empty(())
        self._state = dict(template.__dict__)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator, from the cache if possible, else from the fake kernel."""
        tensors: list[FakeTensor] = []
        key = self._key(func, args, kwargs, tensors)
        if key is None:
            return func(*args, **kwargs)
        entry = _KNOWN.get(key)
        if entry:
            structure, recipes = entry
            return structure(self._recreated(recipe, tensors) for recipe in recipes)
        result = func(*args, **kwargs)
        if entry is None:
            if len(_KNOWN) >= _MOST:
                _KNOWN.clear()
            _KNOWN[key] = self._entry(result, tensors)
        return result

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
        """Return the cache key of a call, or None if its result cannot be cached. Append the call's operands to `tensors`."""
        if not _is_steady(func) or torch.is_inference_mode_enabled():
            return None
        parts: list[Any] = [func, torch.get_default_dtype()]
        return tuple(parts) if self._describe((*args, *kwargs.items()), parts, tensors) else None

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
        """Return whether shape, strides and dtype describe a tensor fully, as for an ordinary CPU tensor of this mode."""
        return (
            tensor.fake_mode is self._mode
            and tensor.constant is None
            and tensor.fake_device == _CPU
            and tensor.layout == torch.strided
            and not tensor.dtype.is_complex
            and not tensor.is_neg()
        )

    def _entry(self, result: Any, tensors: list[FakeTensor]) -> Any:
        """Return a cache entry from which a result can be recreated: (function of its parts, recipe for each part), or ()."""
        structure: Any = type(result) if type(result) in (tuple, list) else next
        if structure is next and isinstance(result, (tuple, list)):
            return ()  # a named tuple
        storages = {storage_of(tensor): at for at, tensor in enumerate(tensors)}
        seen: set[int] = set()
        parts = (result,) if structure is next else result
        recipes = [self._recipe(part, tensors, storages, seen) for part in parts]
        return () if None in recipes else (structure, recipes)

    def _recipe(self, part: Any, tensors: list[FakeTensor], storages: dict[int, int], seen: set[int]) -> Any:
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
        shape, stride, offset = tuple(part.shape), part.stride(), part.storage_offset()
        recipe = ("new", shared, shape, stride, part.dtype, offset)
        copy = self._recreated(recipe, tensors)
        alike = dispatch_keys(copy) == dispatch_keys(part)
        if shared is None:
            # The memory must not be larger than the shape needs, nor shared with another result.
            same_size = storage.nbytes() == copy.untyped_storage().nbytes()
            alike = alike and same_size and storage_key(storage) not in seen
            seen.add(storage_key(storage))
        return recipe if alike else None

    def _recreated(self, recipe: Any, tensors: list[FakeTensor]) -> Any:
        kind = recipe[0]
        if kind == "same":
            return tensors[recipe[1]]
        if kind == "none":
            return None
        _, shared, shape, stride, dtype, offset = recipe
        with without_dispatch():
            memory = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if shared is not None:
                memory.set_(tensors[shared].untyped_storage(), offset, shape, stride)
        fake = fake_of(memory, _CPU)
        fake.__dict__.update(self._state)
        return fake


@cache
def _is_steady(func: Any) -> bool:
    """Return whether the shapes, strides and dtypes of an operator's results depend only on those of its operands."""
    return (
        isinstance(func, OpOverload)
        and func.namespace in _BUILT_IN
        and not _UNSTEADY.intersection(func.tags)
        and operator_schema(func).name not in _RESHAPED
    )


def refusal(func: Any, args: Any, kwargs: Any) -> str | None:
    """Return the error that a call with mixed dtypes raises on this machine, or None if it raises no error.

    Only operators whose error depends on shapes are called (`_REFUSES_BY_SHAPE`), and only with operands of at most
    `_LARGEST` elements. The call uses real, uninitialized tensors: a kernel raises before it reads values.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    large = any(tensor.numel() > _LARGEST for tensor in tensors)
    if operator_schema(func).name not in _REFUSES_BY_SHAPE or large:
        return None

    def real(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, torch.Tensor)
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if is_tensor else leaf

    with without_modes():
        try:
            func(*map_leaves(real, args), **map_leaves(real, kwargs))
        except RuntimeError as error:
            return first_line(error)
    return None
