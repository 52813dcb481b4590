"""The Python state that a step's code can change is saved before a trace and restored after it.

Attributes that the model's modules set change only the model's copy (the twin). But a step can also change globals,
class attributes, memoized results and objects in a loss's closure (a noise scheduler, an average of weights, a cache).
Without a restore, such objects would contain fake tensors after the trace. Only references are saved: the contents of
containers, attributes, cells and globals. The data of real tensors needs no copy, because the step writes into fakes.
"""

from __future__ import annotations

import functools
import gc
import operator
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from isotype.compat.torch import HELD, FakeTensor, without_function_subclasses

_LIMIT = 20_000
"""Maximum number of visited objects, not counting modules and tensors; nearer objects come first. They take about 0.1 s."""
_MOST_REFERENTS = 200
"""Maximum number of objects inside of another library's object that are searched for a tensor of the trace."""
_LONG = 1_000
"""If a container has more elements, they are saved but not visited."""
_ARRAY_BYTES = 1 << 20

_Name = Any
"""Path of an object: a name, or (path of the object's holder, "." or "[]", attribute or key); `_written` formats it."""
# The containers whose contents are saved, each with the method that fills it.
_CONTAINERS: dict[Any, Callable[..., Any]] = {
    OrderedDict: OrderedDict.update, dict: dict.update, list: list.extend, set: set.update, deque: deque.extend,
}  # fmt: skip
_MISSING: Any = object()
_CONTENTS: Any = vars(types.CellType)["cell_contents"]
_LRU: Any = type(functools.lru_cache(lambda: None))
_ATOMS = frozenset({  # the most frequent types without references to visit
    int, float, bool, str, bytes, type(None), range, torch.Size, torch.dtype, torch.device, types.BuiltinFunctionType,
    types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType,
})  # fmt: skip
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property)
# Methods that Python calls implicitly.
_CALLED = (
    "forward", "__call__", "__getitem__", "__setitem__", "__iter__", "__next__", "__enter__", "__exit__", "__getattr__",
)  # fmt: skip
# Types of objects that consist of their references.
_COMPOSED = (functools.partial, types.MethodType, numpy.random.Generator, *_WRAPPERS)
_METHODS = (types.FunctionType, _LRU, *_WRAPPERS)
# Types of imported objects: lazy imports are not undone, because `sys.modules` keeps them, too.
_IMPORTED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
# Instances of libraries' classes are visited; of these packages, only those in `_OPENED`.
_CLOSED = frozenset(sys.stdlib_module_names) | {"torch", "functorch", "numpy", "isotype"}
_OPENED = (
    "torch.nn.", "torch.optim.", "torch.amp.", "torch.distributions.", "collections", "types", "argparse", "weakref",
    "_thread",
)  # fmt: skip


class Untouched:
    """The saved state of all objects that the code of a step can reach.

    Args:
        roots: (name, object) for each object where the search starts, the nearest to the user's code first.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self._containers: list[tuple[Any, Any, Any]] = []
        self._empty: list[Any] = []
        self._undo: list[Callable[[], Any]] = []
        self._opaque: list[tuple[_Name, Any, int | None]] = []
        self._seen: dict[Any, Any] = {}
        self._queue: deque[tuple[_Name, Any]] = deque()
        # Names that visited code uses, and methods whose name no visited code has used so far.
        self._used = set(_CALLED)
        self._methods: dict[str, list[tuple[_Name, Any]]] = {}
        self._more = _LIMIT
        with without_function_subclasses():  # a tensor subclass may raise for access to its attributes
            for name, root in roots:
                self._enqueue(name, root)
            while self._queue and self._more:
                self._open(*self._queue.popleft())

    def restore(self) -> None:
        """Restore the saved state; several traces can share one saved state and restore it after each trace."""
        for kind, current, saved in self._containers:
            if _differ(_references(kind, current), _references(type(saved), saved)):
                kind.clear(current)
                _CONTAINERS[kind](current, saved)
        for filled in filter(None, self._empty):
            filled.clear()
        for undo in self._undo:
            undo()

    @functools.cached_property
    def left(self) -> tuple[str, ...]:
        """A sentence for each object whose state could not be restored."""
        left = []
        for name, value, at in self._opaque:
            title = f"{_written(name)} ({type(value).__qualname__})"
            if _position(value) != at:
                left.append(f"{title} cannot be set back: items that the trace has read are lost")
            elif self._reaches_fake(value):
                left.append(f"{title} still holds a tensor of the trace: create it again")
        if self._queue:
            unseen = f"{len(self._queue):,} objects that the step's code reaches were not examined"
            left.append(f"{unseen}; what the trace assigned to them stays")
        return tuple(left)

    def _enqueue(self, name: _Name, value: Any) -> None:
        """Queue an object for a visit, unless it has been queued before or refers to no other objects."""
        if type(value) in _ATOMS or id(value) in self._seen or isinstance(value, types.ModuleType):
            return
        if type(value) in _CONTAINERS and not value:
            self._empty.append(value)
        elif value is not _MISSING and not (type(value) is tuple and _ATOMS.issuperset(map(type, value))):
            self._seen[id(value)] = value  # keeps the id from being reused
            self._queue.append((name, value))

    def _open(self, name: _Name, value: Any) -> None:
        """Save the state of an object, and queue the objects that it references."""
        cls = type(value)
        self._more -= not isinstance(value, (nn.Module, torch.Tensor))
        opener = next((opener for base, opener in _OPENERS if issubclass(cls, base)), None)
        if opener is not None:
            opener(self, name, value)
        # Some classes of compiled extensions have a descriptor as `__module__`.
        if isinstance(value, torch.Tensor) or _is_opened(str(cls.__module__)):
            self._attributes(name, value)
            self._enqueue(cls.__qualname__, cls)
        elif opener is None:
            self._opaque.append((name, value, _position(value)))

    def _save(self, value: Any) -> Any:
        """Save and return the contents of a container, bypassing overrides of subclasses."""
        kind = next(kind for kind in _CONTAINERS if isinstance(value, kind))
        saved = dict(kind.items(value)) if issubclass(kind, dict) else list(kind.__iter__(value))
        if saved or kind is not type(value):
            self._seen[id(value)] = value
            self._containers.append((kind, value, saved))
        else:
            self._empty.append(value)
        return saved

    def _elements(self, name: _Name, parts: Any) -> None:
        pairs = parts.items() if isinstance(parts, dict) else enumerate(parts)
        for key, part in pairs if len(parts) <= _LONG else ():
            self._enqueue(name, key)
            self._enqueue((name, "[]", key), part)

    def _module(self, name: _Name, module: nn.Module) -> None:
        for key in HELD:
            held = getattr(module, key)
            parts = self._save(held) if isinstance(held, dict) else held  # a ScriptModule has no dict
            for attribute, part in parts.items():
                self._enqueue((name, ".", attribute), part)

    def _attributes(self, name: _Name, value: Any) -> None:
        """Save an object's `__dict__` and slots, bypassing overrides of attribute access."""
        for cls in type(value).__mro__:
            slots = vars(cls).items() if "__slots__" in vars(cls) else ()
            for key, member in slots:
                if isinstance(member, types.MemberDescriptorType):
                    self._reference((name, ".", key), member, value)
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        for key, attribute in self._save(attributes).items() if type(attributes) is dict else ():
            self._enqueue((name, ".", key), attribute)

    def _reference(self, name: _Name, member: Any, holder: Any) -> None:
        """Save one reference: the value of a slot, the contents of a cell, or a gradient."""

        def current() -> Any:
            try:
                return member.__get__(holder)
            except (AttributeError, ValueError):
                return _MISSING

        saved = current()

        def undo() -> None:
            if saved is _MISSING and current() is not saved:
                member.__delete__(holder)
            elif current() is not saved:
                member.__set__(holder, saved)

        self._undo.append(undo)
        self._enqueue(name, saved)

    def _parts(self, name: _Name, value: Any) -> None:
        for part in gc.get_referents(value):
            self._enqueue(name, part)

    def _memo(self, name: _Name, value: Any) -> None:
        """Note a memoized function. Its results are forgotten if the step has added one, because they cannot be listed."""
        misses = value.cache_info().misses

        def undo() -> None:
            nonlocal misses
            if value.cache_info().misses != misses:
                value.cache_clear()
                misses = 0

        self._undo.append(undo)
        self._enqueue(name, value.__wrapped__)

    def _function(self, name: _Name, value: Any) -> None:
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self._enqueue(variable, cell)
        for part in filter(None, (value.__defaults__, value.__kwdefaults__, value.__dict__)):
            self._enqueue(name, part)
        if _is_code_opened(str(value.__module__)):
            names = _names_in(value.__code__)
            self._globals(value.__globals__, names)
            for used in names - self._used:
                self._used.add(used)
                for method_name, method in self._methods.pop(used, ()):
                    self._enqueue(method_name, method)

    def _globals(self, space: dict[str, Any], names: frozenset[str]) -> None:
        """Save globals that code may read or assign by name, and attributes of modules (`tables.CACHE`)."""
        # A package and its modules refer to each other: the key prevents an endless recursion.
        if (id(space), names) in self._seen:
            return
        self._seen[id(space), names] = space
        saved = {name: space.get(name, _MISSING) for name in names}
        self._undo.append(functools.partial(_restore_globals, space, saved))
        for name, value in saved.items():
            if not isinstance(value, types.ModuleType):
                self._enqueue(name, value)
            elif _is_code_opened(value.__name__):
                self._globals(vars(value), names)

    def _class(self, name: _Name, value: type) -> None:
        """Save a class's attributes, and visit the methods that visited code may call by name."""
        if not _is_code_opened(str(value.__module__)):
            return
        for base in value.__bases__:
            self._enqueue(base.__qualname__, base)
        saved = dict(vars(value))
        self._undo.append(functools.partial(_restore_class, value, saved))
        for key, attribute in saved.items():
            if isinstance(attribute, _METHODS) and key not in self._used:
                self._methods.setdefault(key, []).append(((name, ".", key), attribute))
            elif isinstance(attribute, _METHODS) or not key.startswith("__"):
                self._enqueue((name, ".", key), attribute)

    def _tensor(self, name: _Name, value: Any) -> None:
        if value.requires_grad and value.is_leaf:
            self._reference((name, ".", "grad"), torch.Tensor.grad, value)

    def _array(self, _: _Name, value: Any) -> None:
        if value.nbytes <= _ARRAY_BYTES and value.flags.writeable:
            self._undo.append(functools.partial(numpy.copyto, value, value.copy()))

    def _random(self, _: _Name, value: Any) -> None:
        names = ("getstate", "setstate") if isinstance(value, random.Random) else ("get_state", "set_state")
        read, write = (getattr(value, name) for name in names)
        self._undo.append(functools.partial(write, read()))

    def _reaches_fake(self, value: Any) -> bool:
        """Return whether another library's object, whose contents were not visited, holds a fake tensor."""
        stack, seen = [value], {id(value)}
        while stack and len(seen) < _MOST_REFERENTS:
            for part in gc.get_referents(stack.pop()):
                if isinstance(part, FakeTensor):
                    return True
                skipped = type(part) in _ATOMS or isinstance(part, _IMPORTED)
                if not skipped and id(part) not in seen and id(part) not in self._seen:
                    seen.add(id(part))
                    stack.append(part)
        return False


_OPENERS: tuple[tuple[Any, Callable[[Untouched, _Name, Any], None]], ...] = (
    (tuple(_CONTAINERS), lambda self, name, value: self._elements(name, self._save(value))),
    (tuple, lambda self, name, value: self._elements(name, tuple.__getitem__(value, slice(None)))),
    (frozenset, Untouched._elements),
    (types.FunctionType, Untouched._function),
    (type, Untouched._class),
    (nn.Module, Untouched._module),
    (torch.Tensor, Untouched._tensor),
    (types.CellType, lambda self, name, value: self._reference(name, _CONTENTS, value)),
    (_COMPOSED, Untouched._parts),
    (_LRU, Untouched._memo),
    (numpy.ndarray, Untouched._array),
    ((torch.Generator, random.Random, numpy.random.RandomState), Untouched._random),
    (numpy.random.BitGenerator, lambda self, name, value: self._reference(name, type(value).state, value)),
)


def beside_twin(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for what `model` may share with its fake copy: classes, hooks and attributes."""
    for name, module in model.named_modules():
        yield type(module).__qualname__, type(module)
        if isinstance(module, torch.jit.ScriptModule):
            yield name, module
        for key, value in vars(module).items():
            if key not in HELD:
                yield f"{name}.{key}" if name else key, value


@functools.cache
def _is_opened(module: str) -> bool:
    """Return whether the search visits the attributes of objects whose class the Python module `module` defines."""
    return module.startswith(_OPENED) or _is_code_opened(module)


@functools.cache
def _is_code_opened(module: str) -> bool:
    """Return whether the search visits the functions and classes of the Python module `module`."""
    return module.partition(".")[0] not in _CLOSED


def _written(name: _Name) -> str:
    parts = []
    while isinstance(name, tuple):
        name, kind, key = name
        parts.append(f".{key}" if kind == "." else f"[{key!r}]")
    return "".join((str(name), *reversed(parts)))


@functools.lru_cache(maxsize=10_000)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names that `code` and its nested functions use."""
    inner = (_names_in(nested) for nested in code.co_consts if isinstance(nested, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _position(value: Any) -> int | None:
    """Return a number that changes if an item is read from a generator or iterator. Return None for other objects."""
    if isinstance(value, types.GeneratorType):
        return None if value.gi_frame is None else value.gi_frame.f_lasti
    hint = getattr(type(value), "__length_hint__", None)
    return None if hint is None else hint(value)


def _references(kind: Any, container: Any) -> list[Any]:
    return [*kind.__iter__(container), *(kind.values(container) if issubclass(kind, dict) else ())]


def _differ(current: list[Any], saved: list[Any]) -> bool:
    return len(current) != len(saved) or any(map(operator.is_not, current, saved))


def _restore_globals(space: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, before in saved.items():
        value = space.get(name, _MISSING)
        if value is before or isinstance(value, _IMPORTED):
            continue
        if before is _MISSING:
            del space[name]
        else:
            space[name] = before


def _restore_class(cls: type, saved: dict[str, Any]) -> None:
    for key in vars(cls).keys() - saved.keys():
        type.__delattr__(cls, key)
    for key, value in saved.items():
        if vars(cls).get(key, _MISSING) is not value:
            type.__setattr__(cls, key, value)
