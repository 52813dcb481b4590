"""The only walk over a model's modules, with the kind of each."""

from __future__ import annotations

import copy
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from isotype.compat.torch import own_buffers, own_modules, own_parameters
from isotype.model.boundary import Boundary


@dataclass(frozen=True)
class Place:
    """A module in its model.

    Attributes:
        name: fully qualified name.
        kind: `"linear4bit"`, `"linear8bit"`, `"linear"` (and convolutions), `"embedding"`, `"norm"` or
            `"other"`.
        tuner: whether it belongs to a PEFT tuner layer, which casts its own inputs.
        adapter: whether it is part of an adapter: in a tuner layer, or a copy of a module to save.
    """

    name: str
    module: nn.Module
    kind: str
    tuner: bool
    adapter: bool


LINEAR_KINDS = ("linear", "linear4bit", "linear8bit")

_TUNER = "BaseTunerLayer"  # PEFT's base class of layers that wrap another one
_COPIES = ".modules_to_save."  # PEFT's trained copies of whole modules
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
# By name to avoid imports: bitsandbytes' layers, transformers' Conv1D.
_BY_CLASS_NAME = {"Linear4bit": "linear4bit", "Linear8bitLt": "linear8bit", "Conv1D": "linear"}


def kind_of(module: nn.Module) -> str:
    """Return the kind of a module, as in `Place.kind`."""
    cls: Any = type(module)
    return _kind_of(cls)


@cache
def _kind_of(cls: Any) -> str:
    names = [each.__name__ for each in cls.__mro__]
    if _TUNER in names:
        return "other"  # PEFT names its wrappers like the layers they wrap
    for name, kind in _BY_CLASS_NAME.items():
        if name in names:
            return kind
    if issubclass(cls, _LINEAR):
        return "linear"
    if issubclass(cls, nn.Embedding):
        return "embedding"
    plain = cls.original if issubclass(cls, Boundary) else cls
    if "norm" in plain.__name__.lower():
        return "norm"
    return "other"


def is_tuner_layer(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper of a layer."""
    return any(cls.__name__ == _TUNER for cls in type(module).__mro__)


_ROUTER = re.compile(r"Top_?[kK]Router$")


def is_router(module: nn.Module) -> bool:
    """Return whether a module is a router of transformers' classes, which multiplies with its own weight.

    It takes hidden states and returns logits, scores of the chosen experts, and their indices.
    """
    weight = own_parameters(module).get("weight")
    named = any(_ROUTER.search(cls.__name__) for cls in type(module).__mro__)
    return named and weight is not None and weight.ndim == 2


_BLOCK_PARTS = re.compile(
    r"attn|attention|mixer|mamba|mlp|feed_forward|ffn|ssm|rwkv|recurrent", re.IGNORECASE
)


class FoldedList(nn.ModuleList):
    """A ModuleList in which some children represent others (`isotype.model.fold`).

    They keep their original numbers as names; indices count the remaining ones.
    """

    def __getitem__(self, index: Any) -> Any:
        kept = list(self._modules.values())[index]
        return nn.ModuleList(cast("list[nn.Module]", kept)) if isinstance(index, slice) else kept


def lists_of_blocks(model: nn.Module, fewest: int) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield (owner, list) of every list of at least `fewest` blocks; not of experts, which a router indexes."""
    for owner in model.modules():
        for child in owner.children():
            plain = type(child) in (nn.ModuleList, nn.Sequential, FoldedList)
            long = plain and len(child._modules) >= fewest
            if long and all(_is_block(layer) for layer in child.children()):
                yield owner, child


def blocks_in(model: nn.Module, fewest: int = 1) -> list[nn.Module]:
    """Return the blocks of all `lists_of_blocks`, including lists inside blocks."""
    return [block for _, layers in lists_of_blocks(model, fewest) for block in layers.children()]


def _is_block(layer: nn.Module) -> bool:
    """Return whether a layer has attention, mixer or MLP parts, which keep the shape of their input."""
    parts = ((name, type(part).__name__) for name, part in layer.named_modules() if part is not layer)
    return any(_BLOCK_PARTS.search(name) or _BLOCK_PARTS.search(kind) for name, kind in parts)


def places(model: nn.Module) -> Iterator[Place]:
    """Yield every module of `model`, itself included, parents before children; shared modules once."""
    # The tuner layers around the current module, innermost last; modules come depth first.
    tuners: list[str] = []
    for name, module in model.named_modules():
        while tuners and not name.startswith(f"{tuners[-1]}."):
            tuners.pop()
        tuner = bool(tuners) and not f"{name}.".startswith(f"{tuners[-1]}.base_layer.")
        if is_tuner_layer(module):
            tuners.append(name)
        yield Place(name, module, kind_of(module), tuner, tuner or _COPIES in f".{name}.")


def own_float_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the unquantized float parameters of `module` itself."""
    # A sharded weight has lost its class; its codes may have a float dtype.
    codes = "weight" if getattr(module, "quant_state", None) is not None else None
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if not isinstance(parameter, UninitializedParameter)  # a lazy layer's, without a shape yet
        and parameter.is_floating_point()
        and not hasattr(parameter, "quant_state")
        and name != codes
    }


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # including the dicts of parameters and buffers


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the unregistered float tensors of `module` by name, which the model's `.to()` does not move.

    Those in a dict or list are named after it (`meta.scale`, where quantizers keep scales and zero points),
    as are the weights of modules in it (`blocks.0.weight`). They include a parent's weights if the module
    refers to its parent in this way.
    """
    yield from _unregistered(module, "", {id(module)})


def _unregistered(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE:
            yield from _floats_in(value, f"{prefix}{name}", seen)


def _floats_in(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, (dict, list, nn.Module)) and id(value) not in seen:
        seen.add(id(value))
        for key, held in _items(value):
            yield from _floats_in(held, f"{name}.{key}", seen)
        if isinstance(value, nn.Module):
            yield from _unregistered(value, f"{name}.", seen)


def _items(holder: dict[Any, Any] | list[Any] | nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container, or a module's registered ones, by name."""
    if isinstance(holder, list):
        yield from ((str(position), held) for position, held in enumerate(holder))
    elif isinstance(holder, nn.Module):
        for registered in (own_parameters(holder), own_buffers(holder), own_modules(holder)):
            yield from registered.items()
    else:  # keys that are valid in a dotted name
        yield from (each for each in holder.items() if isinstance(each[0], str) and each[0].isidentifier())


_Hook = TypeVar("_Hook", bound=Callable[..., Any])

_LISTENS = "_isotype_listens"


def listening(hook: _Hook) -> _Hook:
    """Mark `hook` as one that only observes and may be skipped."""
    hook.__dict__[_LISTENS] = True
    return hook


def must_be_called(hooks: Mapping[int, Any]) -> bool:
    """Return whether a module has a hook without the mark of `listening`, which may change inputs or outputs."""
    return any(not getattr(hook, _LISTENS, False) for hook in hooks.values())


_ATOMS = frozenset({bool, int, float, str, type(None), torch.dtype})
_HOLDERS = frozenset({dict, OrderedDict, set, list})
_SHARED = (types.ModuleType, type, torch.Generator)


def empty_copies(model: nn.Module, memo: dict[int, Any]) -> None:
    """Add an uninitialized module of the same class to `memo` for every module of `model` not in it."""
    for module in model.modules():
        # A scripted module is a shared C++ object.
        scripted = isinstance(module, torch.jit.ScriptModule)
        memo.setdefault(id(module), module if scripted else object.__new__(type(module)))


def fill_copies(model: nn.Module, memo: dict[int, Any], leave: Collection[int] = ()) -> None:
    """Copy the attributes of modules into their copies in `memo`, except for those with ids in `leave`.

    Objects in `memo` (tensors, containers, by `id`) are replaced. Attributes that cannot be copied (a lock, a
    file, a process group) are shared.
    """
    for module in list(model.modules()):
        copy = memo[id(module)]
        if copy is not module and id(module) not in leave:
            for name, value in module.__dict__.items():
                copy.__dict__[name] = copied(value, memo)
            _fill_slots(copy, module, memo)


def _fill_slots(copy: Any, original: Any, memo: dict[int, Any]) -> None:
    for cls in type(original).__mro__:
        for member in vars(cls).values() if "__slots__" in vars(cls) else ():
            if isinstance(member, types.MemberDescriptorType) and hasattr(original, member.__name__):
                member.__set__(copy, copied(member.__get__(original), memo))


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of an attribute; the attribute itself if it cannot be copied."""
    if isinstance(value, _SHARED) or type(value) in _ATOMS:
        return value
    if type(value) in _HOLDERS and not value:  # nearly every attribute of a module
        return memo.setdefault(id(value), type(value)())
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - a lock, a file, a class that refuses: shared, and put back after the trace
        return value
