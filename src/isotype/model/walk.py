"""Finds a model's modules and the kind of each, and copies modules."""

import copy
import gc
import itertools
import operator
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from isotype.compat.swapped import copy_of
from isotype.compat.torch import own_buffers, own_modules, own_parameters
from isotype.core.names import in_module
from isotype.model.boundary import Boundary


@dataclass(frozen=True)
class Place:
    """A module of a model, and facts about it.

    Attributes:
        kind: `"linear4bit"`, `"linear8bit"`, `"linear"` (with convolutions), `"embedding"`, `"norm"` or `"other"`.
        tuner: True if the module is in one of PEFT's tuner layers, which cast their own inputs.
        adapter: True if the module is in a tuner layer, or in a module that PEFT has copied for training.
    """

    name: str
    module: nn.Module
    kind: str
    tuner: bool
    adapter: bool

    def full_name(self, name: str) -> str:
        """Return the fully qualified name of the module's parameter or buffer `name`."""
        return f"{self.name}.{name}" if self.name else name


Kind = TypeVar("Kind")

LINEAR_KINDS = ("linear", "linear4bit", "linear8bit")

_TUNER = "BaseTunerLayer"  # PEFT's base class of layers that wrap another one
_COPIES = re.compile(r"\.(modules_to_save|ln_tuning_layers)\.")  # PEFT's trained copies of whole modules
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
# Layers of bitsandbytes, and transformers' Conv1D. Names are enough, so neither library is imported.
_BY_CLASS_NAME = {"Linear4bit": "linear4bit", "Linear8bitLt": "linear8bit", "Conv1D": "linear"}


def kind_of(module: nn.Module) -> str:
    cls: Any = type(module)
    kind = _kind_of(cls)
    if kind == "norm" and any(next(child.parameters(), None) is not None for child in module.children()):
        return "other"  # for example DbrxNormAttentionNorm
    return kind


@cache
def _kind_of(cls: Any) -> str:
    names = _names_of(cls)
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
    return "norm" if "norm" in plain.__name__.lower() else "other"


@cache
def _names_of(cls: Any) -> frozenset[str]:
    return frozenset(base.__name__ for base in cls.__mro__)


def derives_from(cls: Any, name: str) -> bool:
    """Return True if a class or one of its bases has this name. The class's library is not imported."""
    return name in _names_of(cls)


def is_tuner_layer(module: nn.Module) -> bool:
    """Return True if a module is a tuner layer of PEFT, which wraps a layer of the model."""
    return derives_from(type(module), _TUNER)


_ROUTER = re.compile(r"Top_?[kK]Router$")


def is_router(module: nn.Module) -> bool:
    """Return True if a module is a router of transformers that has its own weight."""
    weight = own_parameters(module).get("weight")
    named = any(_ROUTER.search(cls.__name__) for cls in type(module).__mro__)
    return named and weight is not None and weight.ndim == 2


_BLOCK_PARTS = re.compile(
    r"attn|attention|mixer|mamba|mlp|feed_forward|ffn|ssm|rwkv|recurrent", re.IGNORECASE
)


STANDS_FOR = "_stands_for"
"""Attribute of a layer in a folded model: the number of layers that this layer represents."""


class FoldedList(nn.ModuleList):
    """A ModuleList from which `isotype.model.repeated_layers` has removed layers. The remaining layers keep their numbers as names."""

    def __getitem__(self, index: Any) -> Any:
        layers = list(self._modules.values())[index]
        return nn.ModuleList(cast("list[nn.Module]", layers)) if isinstance(index, slice) else layers


def repeats_of(model: nn.Module) -> dict[str, int]:
    """Return module name -> number of modules of the original model that this module represents."""
    repeats: dict[str, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        repeats[name] = repeats.get(name.rpartition(".")[0], 1) * int(getattr(module, STANDS_FOR, 1))
    return repeats


def lists_of_blocks(model: nn.Module, fewest: int) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield (module with the list, list) of each list of at least `fewest` blocks. Lists of experts are omitted."""
    for owner in model.modules():
        for child in owner.children():
            plain = type(child) in (nn.ModuleList, nn.Sequential, FoldedList)
            long = plain and len(child._modules) >= fewest
            if long and all(_is_block(layer) for layer in child.children()):
                yield owner, child


def blocks_in(model: nn.Module, fewest: int = 1) -> list[nn.Module]:
    """Return all blocks in lists of at least `fewest` blocks, also in lists inside of other blocks."""
    return [block for _, layers in lists_of_blocks(model, fewest) for block in layers.children()]


def outermost_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each block that is in no other block, in the order of the model."""
    # A ModuleList has no forward, also as an element of another list.
    blocks = {id(block) for block in blocks_in(model) if not isinstance(block, nn.ModuleList)}
    last = None
    for name, module in model.named_modules():
        if id(module) in blocks and (last is None or not in_module(name, last)):
            last = name
            yield name, module


def _is_block(layer: nn.Module) -> bool:
    """Return True if a layer is a block, which contains attention, a mixer or an MLP."""
    parts = ((name, type(part).__name__) for name, part in layer.named_modules() if part is not layer)
    return any(_BLOCK_PARTS.search(name) or _BLOCK_PARTS.search(kind) for name, kind in parts)


def living(kind: type[Kind]) -> Iterator[Kind]:
    """Yield all objects of a type and its subclasses in this process, except objects that `gc.freeze` has frozen."""
    # `isinstance` would read an attribute and load a lazy object of the script.
    yield from (thing for thing in gc.get_objects() if issubclass(type(thing), kind))


def name_in_process(parameter: nn.Parameter) -> str:
    """Return the longest name of a parameter in any module of this process; "" if the parameter is in no child of a module."""
    pairs = (pair for module in living(nn.Module) for pair in module.named_parameters(remove_duplicate=False))
    return max((name for name, value in pairs if value is parameter and "." in name), key=len, default="")


def places(model: nn.Module) -> Iterator[Place]:
    """Yield the place of each module once. The model itself comes first, and parents come before children."""
    # Names of the tuner layers around the current module, the innermost last: modules come depth first.
    tuners: list[str] = []
    for name, module in model.named_modules():
        while tuners and not in_module(name, tuners[-1]):
            tuners.pop()
        copied = _COPIES.search(f".{name}") is not None
        tuner = bool(tuners) and not copied and not in_module(name, f"{tuners[-1]}.base_layer")
        if is_tuner_layer(module):
            tuners.append(name)
        yield Place(name, module, kind_of(module), tuner, tuner or copied)


def is_packed(parameter: torch.Tensor) -> bool:
    """Return whether a parameter holds codes of a quantized layer. 4-bit codes may have a float dtype."""
    return not parameter.is_floating_point() or hasattr(parameter, "quant_state")


def own_float_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the unquantized float parameters of `module` by name, without the parameters of its children."""
    # A sharded weight has lost its class.
    codes = "weight" if getattr(module, "quant_state", None) is not None else None
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if not isinstance(parameter, UninitializedParameter)  # of a lazy layer, without a shape
        and not is_packed(parameter)
        and name != codes
    }


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of float tensors in plain attributes of `module`, because `.to()` does not move these
    tensors.

    In a dict, list or tuple, the name is the attribute and the key (`meta.scale`, `blocks.0.weight`). If an attribute is the
    parent of `module`, the weights of the parent are also yielded.
    """
    visited = {id(module)}
    for name, value in _unregistered(module):
        yield from _floats_in(value, name, visited)


def _unregistered(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)


def _floats_in(value: Any, name: str, visited: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, (dict, list, tuple, nn.Module)) and id(value) not in visited:
        visited.add(id(value))
        for key, item in _items(value):
            yield from _floats_in(item, f"{name}.{key}", visited)


def _items(holder: dict[Any, Any] | list[Any] | tuple[Any, ...] | nn.Module) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, (list, tuple)):
        yield from ((str(position), value) for position, value in enumerate(holder))
    elif isinstance(holder, nn.Module):
        for registered in (own_parameters(holder), own_buffers(holder), own_modules(holder)):
            yield from registered.items()
        yield from _unregistered(holder)
    else:  # only keys that are valid in a dotted name
        yield from ((k, value) for k, value in holder.items() if isinstance(k, str) and k.isidentifier())


_Hook = TypeVar("_Hook", bound=Callable[..., Any])

_LISTENS = "_isotype_listens"


def listening(hook: _Hook) -> _Hook:
    """Mark a hook that only observes. Fused code may skip such a hook."""
    hook.__dict__[_LISTENS] = True
    return hook


def must_be_called(hooks: Mapping[int, Any]) -> bool:
    """Return True if a hook may change inputs or outputs. Hooks from `listening` only observe."""
    return any(not getattr(hook, _LISTENS, False) for hook in hooks.values())


_ATOMS = frozenset({bool, int, float, str, type(None), torch.dtype})
_HOLDERS = frozenset({dict, OrderedDict, set, list})
_SHARED = (types.ModuleType, type, torch.Generator)


def empty_copies(model: nn.Module, memo: dict[int, Any]) -> None:
    """For each module of `model` that `memo` lacks, add an empty module of the same class to `memo`."""
    for module in model.modules():
        # A scripted module is a C++ object, which the copy shares.
        scripted = isinstance(module, torch.jit.ScriptModule)
        memo.setdefault(id(module), module if scripted else object.__new__(type(module)))


def fill_copies(model: nn.Module, memo: dict[int, Any], leave: Collection[int] = ()) -> None:
    """Copy the attributes of each module of `model` to its copy in `memo`, except modules with an `id` in `leave`.

    `memo` maps ids to copies, as in `copy.deepcopy`. Attributes that cannot be copied (a lock, a file) are shared.
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
    """Return a deep copy of an attribute. If it cannot be copied, return the attribute itself."""
    if isinstance(value, _SHARED) or type(value) in _ATOMS:
        return value
    if type(value) in _HOLDERS and not value:  # most attributes of a module are empty; deepcopy is slower
        return memo.setdefault(id(value), type(value)())
    known = len(memo)
    try:
        if isinstance(value, (types.FunctionType, types.MethodType)):
            return _with_copies(value, memo)
        if isinstance(value, partial):
            return _with_copies_in(value, memo)
        result = copy.deepcopy(value, memo)
        if type(result) in (dict, OrderedDict) and result is not value:
            hooks = {key: hook for key, hook in result.items() if isinstance(hook, types.FunctionType)}
            result.update({key: _with_copies(hook, memo) for key, hook in hooks.items()})
        return result
    except Exception:  # noqa: BLE001 - a lock, a file, a class that refuses: shared, and put back after the trace
        for key in [*itertools.islice(memo, known, None)]:  # copies without all attributes
            del memo[key]
        if type(value) is OrderedDict:  # hooks: code that removes a copy's hooks must not change the model's
            return memo.setdefault(id(value), OrderedDict((k, copied(v, memo)) for k, v in value.items()))
        return _object_with_copies(value, memo)


def _with_copies(function: Any, memo: dict[int, Any]) -> Any:
    """Return a function or method that uses copies in place of the modules, tensors and methods that it stores.

    A function stores them in its closure or its defaults (a loop over layers defines `def forward(x, layer=layer)`). For
    example, a copied hook then stores an output in the copied module.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(_with_copies(function.__func__, memo), copied(function.__self__, memo))
    if not isinstance(function, types.FunctionType) or id(function) in memo:
        return memo.get(id(function), function)
    memo[id(function)] = function  # a function can be in its own closure
    closure = function.__closure__ or ()
    stored = *(cell.cell_contents for cell in closure), function.__defaults__, function.__kwdefaults__
    copies = [_with_copies_in(value, memo) for value in stored]
    if any(map(operator.is_not, copies, stored)):
        pairs = zip(closure, stored, copies, strict=False)
        cells = [c if new is old and new is not function else types.CellType(new) for c, old, new in pairs]
        memo[id(function)] = result = copy_of(function, function.__globals__, tuple(cells))
        for cell in cells:
            if cell.cell_contents is function:
                cell.cell_contents = result
        result.__defaults__, result.__kwdefaults__ = copies[-2:]
    return memo[id(function)]


def _with_copies_in(value: Any, memo: dict[int, Any]) -> Any:
    """Return a stored value in which copies replace modules, tensors and methods. Without them, return the value itself."""
    if isinstance(value, types.FunctionType):
        return _with_copies(value, memo)
    if isinstance(value, types.MethodType):
        method = value.__func__, value.__self__
        return value if (copies := _with_copies_in(method, memo)) is method else types.MethodType(*copies)
    if isinstance(value, partial):
        call = value.func, value.args, value.keywords
        function, args, keywords = copies = _with_copies_in(call, memo)
        return value if copies is call else type(value)(function, *args, **keywords)
    if type(value) in (tuple, list, dict):
        parts = value.values() if isinstance(value, dict) else value
        new: Any = [_with_copies_in(part, memo) for part in parts]
        if all(map(operator.is_, new, parts)):
            return value
        new = dict(zip(value, new, strict=True)) if isinstance(value, dict) else type(value)(new)
        return memo.setdefault(id(value), new)  # functions may share the value
    owner = getattr(value, "__self__", value)
    ours = isinstance(owner, (nn.Module, torch.Tensor)) and id(owner) in memo
    return copied(value, memo) if ours else _object_with_copies(value, memo)


def _object_with_copies(value: Any, memo: dict[int, Any]) -> Any:
    """Return a callable object (such as accelerate's wrapper of a forward) with copies in its attributes; without any, itself."""
    kind: Any = type(value)
    if not callable(value) or not hasattr(value, "__dict__") or isinstance(value, (type, nn.Module)):
        return value
    if id(value) not in memo:
        memo[id(value)] = value  # an object can be in its own attributes
        attributes = _with_copies_in(vars(value), memo)
        if attributes is not vars(value) and kind.__new__ is object.__new__:
            memo[id(value)] = copy = object.__new__(kind)
            copy.__dict__.update(attributes)
            _fill_slots(copy, value, memo)
    return memo[id(value)]
