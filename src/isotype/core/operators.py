"""torch's operators by name, their schemas, and their tensor arguments."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from isotype.compat.torch import UNNAMED_VIEW, dispatch_depth, is_profiled, operator_schema, tree_leaves

# In torch 2.13, the meta and fake kernels of experts accept only bfloat16 (`_meta_grouped_mm_common` in
# torch/_meta_registrations.py). CPU and CUDA kernels accept float32 and float16, too. A test in
# tests/trace/test_recorder.py fails when torch no longer needs this table.
BFLOAT16_WITHOUT_MEMORY = frozenset({"aten._grouped_mm.default"})
"""Operators that accept only bfloat16 on meta and fake tensors."""

ATTENTION_KERNELS = (
    "scaled_dot_product", "flash_attn", "_flash_attention", "_efficient_attention", "_varlen_attn",
)  # fmt: skip
"""Substrings in the names of torch's and flash-attn's attention kernels."""

COLLECTIVES = "c10d"
"""Namespace of the operators that processes run together, such as `c10d.allreduce_.default`."""

ADDS_IN_PLACE = re.compile(r"aten\.(?:_foreach_)?(add|sub|lerp|addcmul|addcdiv|addmm|addbmm|baddbmm)_\.")
"""Names of operators that add to their first argument."""


@dataclass(frozen=True, slots=True)
class Schema:
    """An operator's arguments.

    Attributes:
        roles: names of all arguments.
        mutates: True if the operator writes to its first argument.
        written: names of the arguments that the operator writes to.
    """

    roles: tuple[str, ...]
    mutates: bool
    written: frozenset[str]


@cache
def operator_name(func: Any) -> str:
    """Return the name of an operator, such as `aten.mm.default`. The names are cached, because torch builds the string in each call."""
    return str(func)


@cache
def schema_of(func: Any) -> Schema:
    arguments = operator_schema(func).arguments
    first = arguments[0] if arguments else None
    mutates = first is not None and first.alias_info is not None and first.alias_info.is_write
    written = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return Schema(tuple(argument.name for argument in arguments), mutates, frozenset(written))


def tensors_in(func: Any, args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the name (`self`, `tensors[0]`) and tensor of each tensor argument of an operator call."""
    tensors: list[tuple[str, torch.Tensor]] = []
    roles = schema_of(func).roles
    for position, value in enumerate(args):
        _add(tensors, roles[position], value)
    for name, value in kwargs.items():
        _add(tensors, name, value)
    return tensors


MASKED = ("masked_fill", "masked_select", "masked_scatter")
_INDEXED = (
    "index_select", "index_add", "index_copy", "index_fill", "index_reduce", "gather", "scatter", "scatter_add",
    "scatter_reduce", "take", "put", "take_along_dim", "embedding", "nll_loss_forward", "nll_loss2d_forward",
    "multi_margin_loss", "multilabel_margin_loss_forward",
)  # fmt: skip
_BACKWARDS = (
    "nll_loss_backward", "nll_loss2d_backward", "multi_margin_loss_backward", "multilabel_margin_loss_backward"
)  # fmt: skip
_INDICES = {
    **dict.fromkeys((*_INDEXED, *MASKED), slice(1, 2)),
    **dict.fromkeys(_BACKWARDS, slice(2, 3)),
    "_embedding_bag": slice(1, 3),
    "index": slice(1, None),
    "index_put": slice(1, -1),
    "one_hot": slice(0, 1),
    "where": slice(0, 1),
}
"""Maps a function to the positions of the tensors that must have an integer dtype, or bool for `MASKED` and `where`."""


def float_indices(op: str, dtypes: Sequence[torch.dtype]) -> tuple[int, ...]:
    """Return the positions at which a call has a float tensor, but needs integers or a mask."""
    positions = _INDICES.get(op.partition(".")[2].partition(".")[0].removesuffix("_"), slice(0))
    return tuple(at for at in range(len(dtypes))[positions] if dtypes[at].is_floating_point)


_OF_ONE_AXIS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("_log_softmax", "logcumsumexp", "cumsum", "cumprod")
)
"""Operators that reduce or accumulate along an axis. Their second argument is the axis."""


def numbers_in(func: Any, args: Any, kwargs: Any) -> tuple[tuple[str, float], ...]:
    """Return (name, value) for the Python float arguments of a call, and for the axis of operators in `_OF_ONE_AXIS`."""
    kinds = [*map(type, args), *map(type, kwargs.values())]
    if float not in kinds and func not in _OF_ONE_AXIS:
        return ()  # most calls
    named = [*zip(schema_of(func).roles, args, strict=False)]
    numbers = [(name, value) for name, value in named if type(value) is float]
    numbers += named[1:2] if func in _OF_ONE_AXIS else ()
    return (*numbers, *((name, value) for name, value in kwargs.items() if type(value) is float))


def _add(tensors: list[tuple[str, torch.Tensor]], role: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append((role, value))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                tensors.append((f"{role}[{index}]", item))


def leaves(result: Any) -> Iterator[Any]:
    """Yield all items of nested lists and tuples in one sequence."""
    if isinstance(result, (list, tuple)):
        for item in result:
            yield from leaves(item)
    else:
        yield result


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples, dicts and outputs of models."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def given_tensors(args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (`[position]`, tensor) for each tensor in the arguments of a function, also in lists and tuples."""
    arguments = enumerate(leaves((args, tuple(kwargs.values()))))
    return [(f"[{position}]", leaf) for position, leaf in arguments if isinstance(leaf, torch.Tensor)]


@cache
def is_view(func: Any) -> bool:
    """Return True if an operator's result is a view of its operand."""
    aliases = (result.alias_info for result in operator_schema(func).returns)
    return func is UNNAMED_VIEW or any(alias is not None and not alias.is_write for alias in aliases)


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_LIBRARY: Any = torch.library.Library("isotype", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(
    schema: str, keys: Sequence[str] = ("CPU",), fake: Callable[..., Any] | None = None
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator that registers a function as the operator `isotype::…`, without a derivative.

    `fake` is its implementation for fake tensors. A call skips torch's dispatcher, unless a dispatch mode or a
    profiler is active, because the dispatcher takes longer than some kernels.
    """

    def defined(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        for key in keys:
            _LIBRARY.impl(name, function, key)
        if fake is not None:
            torch.library.register_fake(f"isotype::{name}", fake, lib=_LIBRARY)
        dispatched: Any = getattr(torch.ops.isotype, name).default

        @wraps(function)
        def called(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            observed = dispatch_depth() or is_profiled()
            return (dispatched if observed else function)(*args, **kwargs)

        return called

    return defined
