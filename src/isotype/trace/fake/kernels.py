"""A cache of the results of fake kernels, by the shapes, strides and dtypes of their operands.

The cache of `FakeTensorMode` takes a third of a millisecond for a known call, and longer for a new call. This cache is
faster. It contains the calls that torch caches (`_validate_cache_key` in torch/_subclasses/fake_tensor.py, 2.13), and
views. The meta kernels of torch compute the results of frequent operators.
"""

from collections.abc import Sequence
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
    without_dispatch,
    without_modes,
)
from isotype.core.errors import first_line
from isotype.core.operators import operator_name, schema_of, tensors_of
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
# Operators whose meta kernel returns the same result as `FakeTensorMode`, which decomposes many of them in Python.
# Elementwise operators (`torch.Tag.pointwise`) belong to these operators, too.
_BY_META_KERNEL = frozenset({
    "_log_softmax.default", "_log_softmax_backward_data.default", "_softmax.default", "_softmax_backward_data.default",
    "_to_copy.default", "_unsafe_view.default", "addmm.default", "alias.default", "bmm.default", "cat.default",
    "detach.default", "embedding_dense_backward.default", "expand.default", "mean.default", "mean.dim", "mm.default",
    "permute.default", "select.int", "slice.Tensor", "slice_backward.default", "split.Tensor", "split_with_sizes.default",
    "squeeze.dim", "sum.default", "sum.dim_IntList", "t.default", "transpose.int", "unbind.int", "unsqueeze.default",
    "view.default", "zeros_like.default",
})  # fmt: skip
_META_KEYS = dispatch_keys(torch.empty(0, device="meta"))
_MOST = 1 << 16
# Operators whose kernel depends on shapes and strides (`bmm_out_or_baddbmm_` in
# aten/src/ATen/native/LinearAlgebra.cpp). Each kernel has its own error for mixed dtypes.
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
        if entry is None:
            if len(_KNOWN) >= _MOST:
                _KNOWN.clear()
            entry = _KNOWN[key] = self._of_meta_kernel(func, args, kwargs, tensors)
        if entry is None:
            result = func(*args, **kwargs)
            _KNOWN[key] = self._entry(result, tensors)
            return result
        if not entry:
            return func(*args, **kwargs)
        structure, recipes = entry
        return structure(self._recreated(recipe, tensors) for recipe in recipes)

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
        """Return the cache key of a call; None if its result cannot be cached. Also append the call's operands to `tensors`."""
        if not _is_steady(func) or torch.is_inference_mode_enabled():
            return None
        # By id, since hashing an operator takes longer; torch keeps each operator that has run.
        parts: list[Any] = [id(func), torch.get_default_dtype()]
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
        """Return whether shape, strides and dtype fully describe a tensor: a plain CPU tensor of this mode."""
        return (
            tensor.fake_mode is self._mode
            and tensor.constant is None
            and tensor.fake_device == _CPU
            and tensor.layout == torch.strided
            and not tensor.dtype.is_complex
            and not tensor.is_neg()
        )

    def _of_meta_kernel(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
        """Run the operator's meta kernel and return a cache entry; None if `FakeTensorMode` has to compute the result."""
        floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if kwargs.get("device") not in (None, _CPU) or len(floats) > 1 or not has_meta_kernel(func):
            return None
        memory = {id(t): _memory(t.shape, t.stride(), t.dtype, t, t.storage_offset()) for t in tensors}
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        args, kwargs = map_leaves(lambda leaf: memory.get(id(leaf), leaf), (args, kwargs))
        try:
            with without_dispatch():
                result = func(*args, **kwargs)
        except RuntimeError:
            return None  # `FakeTensorMode` has its own error
        return self._entry(result, [memory[id(tensor)] for tensor in tensors])

    def _entry(self, result: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Return (function that collects the results, a recipe for each result); () if they cannot be cached."""
        structure: Any = type(result) if type(result) in (tuple, list) else next
        if structure is next and isinstance(result, (tuple, list)):
            return ()  # a named tuple
        parts = (result,) if structure is next else result
        seen: set[int] = set()
        recipes = [self._recipe(part, tensors, seen) for part in parts]
        return () if None in recipes else (structure, recipes)

    def _recipe(self, part: Any, tensors: Sequence[torch.Tensor], seen: set[int]) -> Any:
        if part is None:
            return ("none",)
        of_meta_kernel = type(part) is torch.Tensor and dispatch_keys(part) == _META_KEYS
        if not of_meta_kernel and not (isinstance(part, FakeTensor) and self._is_plain(part)):
            return None
        for at, tensor in enumerate(tensors):
            if part is tensor:
                return ("same", at)
        if part.requires_grad:
            return None
        storage = part.untyped_storage()
        shared = next((at for at, t in enumerate(tensors) if storage_of(t) == storage_key(storage)), None)
        shape, stride, offset = tuple(part.shape), part.stride(), part.storage_offset()
        recipe = ("new", shared, shape, stride, part.dtype, offset)
        copy = self._recreated(recipe, tensors)
        alike = of_meta_kernel or dispatch_keys(copy) == dispatch_keys(part)
        if shared is None:
            # The memory must not be larger than the shape needs, nor shared with another result.
            same_size = storage.nbytes() == copy.untyped_storage().nbytes()
            alike = alike and same_size and storage_key(storage) not in seen
            seen.add(storage_key(storage))
        return recipe if alike else None

    def _recreated(self, recipe: Any, tensors: Sequence[torch.Tensor]) -> Any:
        if recipe[0] != "new":
            return tensors[recipe[1]] if recipe[0] == "same" else None
        _, shared, shape, stride, dtype, offset = recipe
        over = None if shared is None else tensors[shared]
        fake = fake_of(_memory(shape, stride, dtype, over, offset), _CPU)
        fake.__dict__.update(self._state)
        return fake


def _memory(shape: Any, stride: Any, dtype: torch.dtype, over: torch.Tensor | None, offset: Any) -> Any:
    """Return a meta tensor over the storage of `over`; over a new storage if `over` is None."""
    with without_dispatch():
        memory = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if over is not None:
            memory.set_(over.untyped_storage(), offset, shape, stride)
    return memory


@cache
def has_meta_kernel(func: Any) -> bool:
    """Return whether the meta kernel of an operator has the same result as `FakeTensorMode`."""
    listed = operator_name(func).removeprefix("aten.") in _BY_META_KERNEL
    writes_out = "out" in schema_of(func).roles
    return _is_steady(func) and (listed or torch.Tag.pointwise in func.tags) and not writes_out


@cache
def _is_steady(func: Any) -> bool:
    """Return whether the results' shapes, strides and dtypes depend only on those of the operands."""
    return (
        isinstance(func, OpOverload)
        and func.namespace in _BUILT_IN
        and not _UNSTEADY.intersection(func.tags)
        and operator_schema(func).name not in _RESHAPED
    )


def refusal(func: Any, args: Any, kwargs: Any) -> str | None:
    """Return the error that a call with mixed dtypes raises on this machine, or None if it raises no error.

    The operator is called on real, uninitialized tensors, because its kernel raises the error before it reads values.
    Return None for operands over `_LARGEST` elements, and for operators that are not in `_REFUSES_BY_SHAPE`. A
    convolution is called only with a float32 input, for which the error does not depend on the CPU's instructions.
    """
    large = any(tensor.numel() > _LARGEST for tensor in tensors_of((args, kwargs)))
    convolves = func is torch.ops.aten.convolution.default and args[0].dtype == torch.float32
    if large or not (convolves or operator_schema(func).name in _REFUSES_BY_SHAPE):
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
