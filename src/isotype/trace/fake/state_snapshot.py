"""Saves, before a trace, the Python state that a step's code can change, and restores the state after the trace.

Attributes of modules need no saving, because the step sets them in the twin. But the step can store fake tensors
elsewhere: in globals, class attributes, memoized results, and objects in a loss's closure. Such an object is a noise
scheduler, an average of weights, or a cache. The snapshot stores the attributes and items of these objects, but no
copies of real tensors, because the step writes into fakes.
"""

import dis
import functools
import gc
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from operator import is_not
from typing import Any

import numpy
import torch
from torch import nn

from isotype.compat.standard import source_of
from isotype.compat.torch import CHILDREN, HELD, FakeTensor, without_function_subclasses

_LIMIT = 20_000
"""Maximum number of visited objects (modules do not count), for about 0.1 s. The nearest objects are visited first."""
_FUNCTIONS = 500
"""Maximum number of functions whose globals are visited. The nearest functions are visited first."""
_MOST_REFERENTS = 200
"""Maximum number of objects in a memo or an iterator that are searched for a fake tensor."""
_LONG = 1_000
"""A container with more elements is saved, but its elements are not visited."""
_ARRAY_BYTES = 1 << 20

_Name = Any
"""Path of an object: a name, or (path of the object that holds it, "." or "[]", attribute or key)."""
_HOLDERS = (dict, OrderedDict, set)
"""Types of the containers in which a module stores its hooks. Most of these containers are empty."""
_MISSING: Any = object()
_CONTENTS: Any = vars(types.CellType)["cell_contents"]
_LRU: Any = type(functools.lru_cache(lambda: None))
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_ATOMS = frozenset({  # without references to visit
    int, float, bool, str, bytes, complex, type(None), type(...), range, slice, torch.Size, torch.dtype, torch.device,
    torch.layout, torch.memory_format, types.BuiltinFunctionType, types.CodeType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
    types.ModuleType, types.MappingProxyType,
})  # fmt: skip
# Methods that Python calls implicitly.
_CALLED = (
    "forward", "__call__", "__getitem__", "__setitem__", "__iter__", "__next__", "__enter__", "__exit__", "__getattr__",
)  # fmt: skip
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property, _LRU)
# Types of imported objects. A lazy import is not undone, because `sys.modules` keeps the module, too.
_IMPORTED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
# Objects of libraries' classes are visited. If a class is defined in one of these packages, its objects are visited only
# if `_OPENED` contains it.
_CLOSED = frozenset(sys.stdlib_module_names) | {"torch", "functorch", "numpy", "isotype"}
_OPENED = (
    "torch.nn.", "torch.optim.", "torch.amp.", "torch.distributions.", "collections", "types", "argparse", "weakref",
    "_thread",
)  # fmt: skip
# Types of objects that consist of their references.
_COMPOSED = (
    functools.partial, types.MethodType, staticmethod, classmethod, property, functools.cached_property,
)  # fmt: skip


class Untouched:
    """The saved state of all objects that the code of a step can reach.

    Args:
        roots: (name, object) for each object where the search starts, the nearest to the user's code first.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._empty: list[Any] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._undo: list[Callable[[], Any]] = []
        self._generators: list[tuple[_Name, types.GeneratorType[Any, Any, Any], int]] = []
        self._caches: dict[Any, Any] = {}
        self._alive: list[Any] = []
        self._seen: set[Any] = set()
        self._queue: deque[tuple[_Name, Any]] = deque()
        # Names that the visited code uses, and methods that no visited code has named yet.
        self._used = set(_CALLED)
        self._methods: dict[str, list[tuple[_Name, Any]]] = {}
        self._more_objects, self._more_functions = _LIMIT, _FUNCTIONS
        self._opaque: list[tuple[_Name, Any]] = []
        with without_function_subclasses():  # a tensor subclass may raise for access to its attributes
            for name, root in roots:
                self._enqueue(name, root)
            while self._queue and self._more_objects:
                self._open(*self._queue.popleft())

    def restore(self) -> None:
        """Restore the saved state. Several traces can share it; each trace calls this method at its end."""
        for current, saved in self._dicts:
            if _differ([*dict.values(current)], [*saved.values()]):
                kind: Any = OrderedDict if isinstance(current, OrderedDict) else dict
                kind.clear(current)
                kind.update(current, saved)
        for filled in filter(None, self._empty):
            filled.clear()
        for leaf, gradient in self._gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient
        for undo in self._undo:
            undo()
        for cached, before in self._caches.items():
            # A search takes long. A cache without new entries holds no fake tensor.
            if cached.cache_info() != before and _reaches_fake(cached, self._seen):
                cached.cache_clear()
                self._caches[cached] = cached.cache_info()

    @functools.cached_property
    def left(self) -> tuple[str, ...]:
        """A sentence for each object whose state could not be restored."""
        moved = [
            f"the generator {_written(name)} cannot be rewound: items that the trace has read are lost"
            for name, generator, at in self._generators
            if generator.gi_frame is None or generator.gi_frame.f_lasti != at
        ]
        holding = [
            f"{_written(name)} ({type(value).__qualname__}) still holds a tensor of the trace: create it again"
            for name, value in self._opaque
            if _reaches_fake(value, self._seen)
        ]
        more = f"{len(self._queue):,} objects of the step's code were not examined, so they may still hold values that the trace assigned"
        return (*moved, *holding, *([more] if self._queue else ()))

    def _enqueue(self, name: _Name, value: Any) -> None:
        """Queue an object for a visit, unless it was queued before or refers to no other objects."""
        atoms = value is _MISSING or (type(value) is tuple and _ATOMS.issuperset(map(type, value)))
        if type(value) not in _ATOMS and id(value) not in self._seen and not atoms:
            self._seen.add(id(value))
            self._alive.append(value)  # keeps the id from being reused
            self._queue.append((name, value))

    def _open(self, name: _Name, value: Any) -> None:
        """Save the state of an object, and queue the objects that it references."""
        cls = type(value)
        if isinstance(value, nn.Module):
            self._module(name, value)
            return
        if isinstance(value, types.ModuleType):
            return
        self._more_objects -= 1
        opener = next((opener for base, opener in _OPENERS if issubclass(cls, base)), None)
        if opener is not None:
            opener(self, name, value)
        if issubclass(cls, _COMPLETE):
            return
        if _is_opened(cls.__module__):
            self._attributes(name, value)
            self._enqueue(cls.__qualname__, cls)
        elif opener is None:
            self._opaque.append((name, value))

    def _module(self, name: _Name, module: nn.Module) -> None:
        self._save(vars(module))
        for key, value in vars(module).items():
            if key in HELD and value:
                self._save(value)
                for attribute, part in value.items():
                    if key == CHILDREN:
                        self._enqueue((name, ".", attribute), part)
                    elif part is not None and id(part) not in self._seen:
                        self._tensor((name, ".", attribute), part)
            elif type(value) in _HOLDERS and not value:
                self._empty.append(value)
            else:
                self._enqueue((name, ".", key), value)
        self._enqueue(type(module).__qualname__, type(module))

    def _save(self, current: dict[Any, Any]) -> dict[Any, Any]:
        saved = dict(dict.items(current))  # bypasses overrides of subclasses
        self._dicts.append((current, saved))
        return saved

    def _elements(self, name: _Name, value: Any) -> None:
        self._items(name, value, [*enumerate(value)])

    def _items(self, name: _Name, value: Any, items: Collection[tuple[Any, Any]]) -> None:
        if len(items) > _LONG:
            self._opaque.append((name, value))
            return
        for key, item in items:
            self._enqueue(name, key)
            self._enqueue((name, "[]", key), item)

    def _changeable(self, name: _Name, value: Any) -> None:
        """Save the contents of a list, set or deque without calling methods of its subclass."""
        kind: Any = next(kind for kind in (list, set, deque) if isinstance(value, kind))
        saved = list(kind.__iter__(value))

        def undo() -> None:
            if _differ([*kind.__iter__(value)], saved):
                kind.clear(value)
                (kind.update if kind is set else kind.extend)(value, saved)

        self._undo.append(undo)
        self._elements(name, saved)

    def _instance(self, name: _Name, value: Any) -> None:
        """Save an object's `__dict__` without calling its own `__getattribute__`."""
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        for key, attribute in self._save(attributes).items() if type(attributes) is dict else ():
            self._enqueue((name, ".", key), attribute)

    def _attributes(self, name: _Name, value: Any) -> None:
        self._instance(name, value)
        for cls in type(value).__mro__:
            if "__slots__" in vars(cls):
                for key, member in vars(cls).items():
                    if isinstance(member, types.MemberDescriptorType):
                        self._reference((name, ".", key), member, value)

    def _reference(self, name: _Name, member: Any, holder: Any) -> None:
        """Save one reference: the value of a slot or the contents of a cell."""

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
        self._caches[value] = value.cache_info()
        self._enqueue(name, value.__wrapped__)

    def _function(self, name: _Name, value: Any) -> None:
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self._enqueue(variable, cell)
        for part in filter(None, (value.__defaults__, value.__kwdefaults__, value.__dict__)):
            self._enqueue(name, part)
        if self._more_functions and _is_code_opened(value.__module__ or ""):
            self._more_functions -= 1
            names, assigns = _names_in(value.__code__)
            self._globals(value.__globals__, names, assigns)
            for used in names - self._used:
                self._used.add(used)
                for method_name, method in self._methods.pop(used, ()):
                    self._enqueue(method_name, method)

    def _globals(self, space: dict[str, Any], names: frozenset[str], assigns: bool) -> None:
        """Save the globals that code may read or assign by name. Attributes of modules (`tables.CACHE`) are saved, too."""
        for name in names if assigns else names.intersection(space):
            value = space.get(name, _MISSING)
            # A package and its modules refer to each other. The key of a module prevents an endless recursion.
            key = (id(value), names) if isinstance(value, types.ModuleType) else (id(space), name)
            if key in self._seen:
                continue
            self._seen.add(key)
            if not isinstance(value, types.ModuleType):
                self._undo.append(functools.partial(_restore_global, space, name, value))
                self._enqueue(name, value)
            elif _is_code_opened(value.__name__):
                self._globals(vars(value), names, False)

    def _class(self, name: _Name, value: type) -> None:
        """Save a class's attributes, and visit the methods that the visited code may call by name."""
        if not _is_code_opened(value.__module__):
            return
        for base in value.__bases__:
            self._enqueue(base.__qualname__, base)
        saved = {key: attribute for key, attribute in vars(value).items() if not key.startswith("__")}
        self._undo.append(functools.partial(_restore_class, value, saved))
        for key, attribute in dict(vars(value)).items():
            if isinstance(attribute, _METHODS) and key not in self._used:
                self._methods.setdefault(key, []).append(((name, ".", key), attribute))
            elif isinstance(attribute, _METHODS) or key in saved:
                self._enqueue((name, ".", key), attribute)

    def _tensor(self, name: _Name, value: Any) -> None:
        if isinstance(value, FakeTensor):
            return
        self._seen.add(id(value))
        if value.requires_grad and value.is_leaf:
            self._gradients.append((value, value.grad))
        self._instance(name, value)

    def _array(self, name: _Name, value: Any) -> None:
        if value.dtype == object:
            self._elements(name, value.ravel())
        elif value.nbytes <= _ARRAY_BYTES and value.flags.writeable:
            self._undo.append(functools.partial(numpy.copyto, value, value.copy()))

    def _random(self, name: _Name, value: Any) -> None:
        if isinstance(value, torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        else:
            source = source_of(value)
            self._undo.append(functools.partial(setattr, source, "state", source.state))

    def _generator(self, name: _Name, value: Any) -> None:
        if value.gi_frame is not None:
            self._generators.append((name, value, value.gi_frame.f_lasti))

    def _iterator(self, name: _Name, value: Any) -> None:
        reduced = value.__reduce__()
        if len(reduced) == 3:
            self._undo.append(functools.partial(value.__setstate__, reduced[2]))


_OPENERS: tuple[tuple[Any, Callable[[Untouched, _Name, Any], None]], ...] = (
    (dict, lambda self, name, value: self._items(name, value, self._save(value).items())),
    (tuple, lambda self, name, value: self._elements(name, tuple.__getitem__(value, slice(None)))),
    (types.FunctionType, Untouched._function),
    (type, Untouched._class),
    (torch.Tensor, Untouched._tensor),
    (types.CellType, lambda self, name, value: self._reference(name, _CONTENTS, value)),
    (_COMPOSED, Untouched._parts),
    (_LRU, Untouched._memo),
    ((list, set, deque), Untouched._changeable),
    (frozenset, lambda self, name, value: self._elements(name, list(value))),
    (numpy.ndarray, Untouched._array),
    ((torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState), Untouched._random),
    (types.GeneratorType, Untouched._generator),
    (type(iter([])), Untouched._iterator),
)
# Types whose openers visit everything that an instance references.
_COMPLETE = (*_COMPOSED, _LRU, type, types.FunctionType, types.GeneratorType, types.CellType)


def beside_twin(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for each object that `model` and its fake copy may share: classes, hooks and attributes."""
    for name, module in model.named_modules():
        yield type(module).__qualname__, type(module)
        if isinstance(module, torch.jit.ScriptModule):
            yield from module.named_parameters(name, recurse=False)
        for key, value in vars(module).items():
            empty = type(value) in _HOLDERS and not value
            if key not in HELD and type(value) not in _ATOMS and not empty:
                yield f"{name}.{key}" if name else key, value


@functools.cache
def _is_opened(module: str) -> bool:
    """Return whether the search visits the attributes of an object whose class the Python module `module` defines."""
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
def _names_in(code: types.CodeType) -> tuple[frozenset[str], bool]:
    """Return the names that `code` and its nested functions use, and whether they assign globals."""
    inner = [_names_in(nested) for nested in code.co_consts if isinstance(nested, types.CodeType)]
    names = frozenset(code.co_names).union(*(names for names, _ in inner))
    return names, _STORE_GLOBAL in code.co_code[::2] or any(assigns for _, assigns in inner)


def _differ(current: list[Any], saved: list[Any]) -> bool:
    return len(current) != len(saved) or any(map(is_not, current, saved))


def _restore_global(space: dict[str, Any], name: str, saved: Any) -> None:
    value = space.get(name, _MISSING)
    changed = value is not saved and not isinstance(value, _IMPORTED)
    if changed and saved is _MISSING:
        del space[name]
    elif changed:
        space[name] = saved


def _restore_class(cls: type, saved: Mapping[str, Any]) -> None:
    for key in {*vars(cls), *saved}:
        if key in saved and vars(cls).get(key, _MISSING) is not saved[key]:
            type.__setattr__(cls, key, saved[key])
        elif key not in saved and not key.startswith("__"):
            type.__delattr__(cls, key)


def _reaches_fake(value: Any, visited: Set[int]) -> bool:
    """Return whether an object that was not opened (a memo, an iterator, a long list) holds a fake tensor."""
    stack, seen = [value], {id(value)}
    while stack and len(seen) < _MOST_REFERENTS:
        for part in gc.get_referents(stack.pop()):
            if isinstance(part, FakeTensor):
                return True
            skipped = type(part) in _ATOMS or isinstance(part, _IMPORTED)
            if not skipped and id(part) not in seen and id(part) not in visited:
                seen.add(id(part))
                stack.append(part)
    return False
