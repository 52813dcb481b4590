"""Removes equal layers from a model before a trace. For example, two of 80 equal layers stay, and represent all of
them.

This change (folding) is made in place. If the model has weights, fold a copy of the model.
"""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from isotype.compat.peft import without_peft
from isotype.compat.swapped import swap
from isotype.compat.torch import forward_hooks, forward_pre_hooks, own_buffers, own_parameters
from isotype.core.names import grouped
from isotype.model.parts import feature_layers, towers_of
from isotype.model.walk import STANDS_FOR, FoldedList, lists_of_blocks

_FEWEST = 4  # for up to 3 equal layers folding saves little
_POSITION = re.compile(r"(^|_)(idx|layer|(layer|block|depth)_?(idx|id|index|number|num|i))$")
_COUNT = re.compile(r"^(n|num)_.*(layers?|blocks?)$|^(encoder|decoder)_layers$|^(depth|n_layer|num_layers)$")
_ALL = re.compile(r"^[\s\w.]*(n|num)_(hidden_)?layers?\s*$")
"""Matches the source code of `end` in `layers[start:end]` if `end` is the number of layers."""
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_NUMBERS_OF_LAYERS = re.compile(r"layers$|indexes$|indices$|_idxs?$")
_TOKENS = re.compile(r"token_ids?$")
# Gemma 3n and 4 have an embedding outside of the layers with a slice for each layer. Folding cannot shorten it.
_NOT_FOLDED = ("hidden_size_per_layer_input",)

calls_represented: ContextVar[int] = ContextVar("calls_represented", default=1)
"""Number of equal calls that one call of a layer represents in a trace. The layer may also represent several layers."""


@contextmanager
def representing(count: int) -> Iterator[None]:
    """In the `with` block, each operator represents `count` equal calls in a trace."""
    token = calls_represented.set(count)
    try:
        yield
    finally:
        calls_represented.reset(token)


@dataclass(frozen=True)
class _Fold:
    """The plan to fold a list: the layers that stay, and the layers that each of them represents.

    Attributes:
        kept: original number of each layer that stays -> number of layers that it represents.
        represents: for each original layer, the index (in the folded list) of the layer that represents it.
    """

    kept: dict[int, int]
    represents: tuple[int, ...]


def fold(model: nn.Module) -> nn.Module:
    """Remove layers of a model that equal other layers, in place. Return the model.

    Only lists of at least 4 layers are folded, and none of a tower if the model reads the outputs of its inner layers by
    number. Layers are equal if their modules, parameters and buffers are equal. Equal modules have the same class and plain
    attributes (except the layer's number). Equal tensors have the same name, shape, dtype, device and `requires_grad`. The first and last layer of each kind stay, with their names
    (`model.layers.0`, `model.layers.79`). The first layer represents only itself, so that its extra work counts once.
    The last layer represents all others (attribute `_stands_for`). Layer numbers and configs are updated.
    """
    base = without_peft(model)
    towers = towers_of(base) if feature_layers(base) not in ([], [-1]) else ()
    numbered = {id(module) for _, tower in towers for module in tower.modules()}
    folded: list[tuple[nn.Module, nn.Module, _Fold]] = []
    for owner, layers in lists_of_blocks(model, _FEWEST):
        around = tuple(_around(model, owner))
        by_number = (
            any(getattr(_config_of(around), name, 0) for name in _NOT_FOLDED) or id(layers) in numbered
        )
        if isinstance(layers, FoldedList) or by_number or _is_sliced(around, layers):
            continue
        plan = _plan([_signature(layer) for layer in layers.children()])
        if len(plan.kept) < len(plan.represents):
            folded.append((owner, layers, plan))
    memo: dict[int, Any] = {}  # modules that share a config share its copy
    for module in model.modules() if folded else ():
        configs = {name: value for name, value in vars(module).items() if _is_config(value)}
        vars(module).update({name: copy.deepcopy(value, memo) for name, value in configs.items()})
    patched: dict[int, _Fold] = {}
    for owner, layers, plan in folded:
        _drop(layers, plan)
        _renumber(owner, plan)
        config = _config_of(_around(model, owner))
        if config is not None and id(config) not in patched:
            patched[id(config)] = plan
            _patch_config(config, plan)
    return model


def _is_sliced(around: Sequence[nn.Module], layers: nn.Module) -> bool:
    """Return True if a forward uses a slice of the list. `around` contains the owner of the list and the modules around it."""
    name = next(name for name, child in around[0].named_children() if child is layers)
    slicing = re.compile(rf"\.{name}\[([^\]:]*):([^\]]*)\]")
    slices = (part for module in around for part in slicing.findall(_source(type(module).forward)))
    return any(start.strip() or not _ALL.search(end) for start, end in slices)


@functools.cache
def _source(forward: Callable[..., Any]) -> str:
    """Return the source code of a forward; "" if the code is not on this machine."""
    try:
        return inspect.getsource(forward)
    except (OSError, TypeError):
        return ""


def stands_for(model: nn.Module) -> dict[str, int]:
    """Return full name -> number of equal layers, for each layer that represents these layers in a folded list."""
    return {n: getattr(m, STANDS_FOR) for n, m in model.named_modules() if hasattr(m, STANDS_FOR)}


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """Return all properties of a layer that can change its trace, except the layer's number."""
    return tuple((n, type(m), _tensors(m), _attributes(m), _hooks(m)) for n, m in layer.named_modules())


def _tensors(module: nn.Module) -> tuple[Any, ...]:
    def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
        state = _state(getattr(tensor, "quant_state", None))
        return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, state

    tensors = (*own_parameters(module).items(), *own_buffers(module).items())
    return tuple((name, None if tensor is None else facts(tensor)) for name, tensor in tensors)


def _state(state: Any) -> tuple[Any, ...] | None:
    if state is None:
        return None
    absmax = getattr(state, "absmax", None)
    dtypes = (state.dtype, state.quant_type, getattr(absmax, "dtype", None))
    return (*dtypes, state.blocksize, _state(state.state2))


def _attributes(module: nn.Module) -> tuple[Any, ...]:
    """Return (name, value) of a module's plain attributes. Floats become True if nonzero, else False."""
    return tuple(
        (name, bool(value) if isinstance(value, float) else value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, _PLAIN) and not (_is_number(value) and _POSITION.search(name))
    )


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """Return (names of a module's own attributes, names of its hooks' functions or classes)."""
    run = (*forward_pre_hooks(module).values(), *forward_hooks(module).values())
    names = (getattr(hook, "__qualname__", type(hook).__qualname__) for hook in run)
    return frozenset(vars(module)), tuple(names)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _plan(signatures: Sequence[Any]) -> _Fold:
    """Return which layers of a list stay. The argument contains the kind (signature) of each layer.

    For each kind, cut the list before the first and after the last layer of that kind. In each piece between two cuts,
    the first and the last layer of each kind stay.
    """
    count = len(signatures)
    first = {signature: number for number, signature in reversed(list(enumerate(signatures)))}
    last = {signature: number for number, signature in enumerate(signatures)}
    cuts = sorted({0, count, *first.values(), *(number + 1 for number in last.values())})
    groups: list[list[int]] = []
    for start, end in pairwise(cuts):
        groups += grouped(range(start, end), lambda number: signatures[number]).values()
    counts: dict[int, int] = {}
    keeper: dict[int, int] = {}
    for group in groups:
        counts[group[-1]] = max(1, len(group) - 1)
        counts[group[0]] = 1
        keeper |= dict.fromkeys(group[1:], group[-1]) | {group[0]: group[0]}
    kept = dict(sorted(counts.items()))
    position = {number: place for place, number in enumerate(kept)}
    return _Fold(kept, tuple(position[keeper[number]] for number in range(count)))


def _drop(layers: nn.Module, plan: _Fold) -> None:
    for number, name in enumerate(list(layers._modules)):
        if number not in plan.kept:
            del layers._modules[name]
    if isinstance(layers, nn.ModuleList):
        swap(layers, FoldedList)
    for layer, count in zip(layers.children(), plan.kept.values(), strict=True):
        setattr(layer, STANDS_FOR, count)
        for module in layer.modules():
            for name, value in list(vars(module).items()):
                if _is_number(value) and _POSITION.search(name) and 0 <= value < len(plan.represents):
                    setattr(module, name, plan.represents[value])


def _is_config(value: object) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _config_of(around: Iterable[nn.Module]) -> Any:
    configs = (vars(module).get("config") for module in around)
    return next(filter(_is_config, configs), None)


def _around(model: nn.Module, owner: nn.Module) -> Iterator[nn.Module]:
    """Yield `owner` and the modules around it, beginning with the nearest."""
    holder = {id(child): parent for parent in model.modules() for child in parent.children()}
    module: nn.Module | None = owner
    while module is not None:
        yield module
        module = holder.get(id(module))


def _patch_config(config: Any, plan: _Fold) -> None:
    count = len(plan.represents)
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == count and not _TOKENS.search(name):
            setattr(config, name, type(value)(value[number] for number in plan.kept))
        elif _is_number(value) and value == count and _COUNT.search(name):
            setattr(config, name, len(plan.kept))
    _renumber(config, plan)


def _renumber(holder: object, plan: _Fold) -> None:
    """Replace layer numbers in lists such as `cross_attention_layers` by positions in the folded list."""
    count = len(plan.represents)
    for name, value in list(vars(holder).items()):
        if not isinstance(value, (list, tuple)) or not _NUMBERS_OF_LAYERS.search(name):
            continue
        numbers = all(_is_number(number) and 0 <= number < count for number in value)
        if numbers and len(set(value)) == len(value) < count:
            positions = (position for position, number in enumerate(plan.kept) if number in value)
            setattr(holder, name, type(value)(positions))
