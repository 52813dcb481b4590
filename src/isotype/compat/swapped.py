"""Swaps a module's class for a subclass with another forward, and copies functions with a changed global variable.

After a swap, `isinstance`, `deepcopy`, pickle and fully qualified names work as before, and the swap can be undone.
`torch.nn.utils.parametrize` and FSDP2 swap classes in the same way.
"""

import dis
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from isotype.compat.accelerate import FORWARD_BEFORE


class Swapped:
    """Base of the classes of `swapped_class`. To create the class again, pickle calls `made_by[0](*made_by[1])`."""

    original: type[nn.Module]
    made_by: tuple[Callable[..., Any], tuple[Any, ...]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # If code creates another module of this class (`type(model)(config)`), the new module gets the original class.
        base = self.original
        self.__class__ = base  # type: ignore[assignment]
        base.__init__(self, *args, **kwargs)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The module's class returns its state. Recurrent layers leave weak references out of it.
        return _rebuild, type(self).made_by, self.__getstate__()


def swapped_class(
    marker: type[Swapped],
    made_by: tuple[Callable[..., Any], tuple[Any, ...]],
    base: Any,
    members: Mapping[str, Callable[..., Any]],
    **attributes: Any,
) -> Any:
    """Return a subclass of `marker` and `base` with the methods `members`, which get the signatures of `base`'s methods."""
    methods = {name: _like(member, getattr(base, name)) for name, member in members.items()}
    names = {"original": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (marker, base), {**names, **attributes, **methods, "made_by": made_by})


def _like(member: Any, original: Any) -> Callable[..., Any]:
    """Return a copy of `member` with the signature of `original`. Trainers read the signature of a forward."""
    return functools.wraps(original)(copy_of(member, member.__globals__, member.__closure__))


def copy_of(
    function: Any, names: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    """Return a copy of a function with the globals `names` and another closure."""
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    vars(copy).update(vars(function))
    return copy


def swap(module: nn.Module, cls: Any) -> None:
    """Set the class of `module` to `cls`: a result of `swapped_class`, or the original class."""
    module.__class__ = cls
    for name in ("forward", FORWARD_BEFORE):  # accelerate's hooks store the bound method that they call
        method = module.__dict__.get(name)
        if isinstance(method, types.MethodType) and method.__self__ is module:
            module.__dict__[name] = types.MethodType(cls.forward, module)


def _rebuild(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    cls = make(*arguments)
    return cls.__new__(cls)


def innermost(function: types.FunctionType) -> types.FunctionType | None:
    """Return the function inside all decorators; None if a decorator does not have it in its closure."""
    if not hasattr(function, "__wrapped__"):
        return function
    return None if _cell(function) is None else innermost(function.__wrapped__)


def globals_of(function: types.FunctionType) -> set[str] | None:
    """Return the names of the globals that a function reads; None if a copy by `with_global` would behave differently."""
    inner = innermost(function)
    if inner is None:
        return None
    steps = [(step.opname, str(step.argval)) for step in dis.get_instructions(inner)]
    if any(operator in ("STORE_GLOBAL", "DELETE_GLOBAL") for operator, _ in steps):
        return None
    return {name for operator, name in steps if operator == "LOAD_GLOBAL"}


def with_global(function: types.FunctionType, name: str, value: Any) -> types.FunctionType:
    """Return a copy of a function. The copy and its decorators read `value` as the global variable `name`.

    Raise ValueError if a decorator does not have the function in its closure. Then `globals_of` returns None.
    """
    names, closure, inner = function.__globals__, function.__closure__, None
    if hasattr(function, "__wrapped__"):
        at = _cell(function)
        if at is None or closure is None:
            raise ValueError(f"{function.__qualname__} is not in the closure of its decorator")
        inner = with_global(function.__wrapped__, name, value)
        closure = (*closure[:at], types.CellType(inner), *closure[at + 1 :])
    else:
        names = {**names, name: value}
    copy = copy_of(function, names, closure)
    if inner is not None:
        vars(copy)["__wrapped__"] = inner
    return copy


def update_globals(copy: types.FunctionType, function: types.FunctionType, name: str) -> None:
    """Give `copy`, a result of `with_global`, the current globals of `function`, except the global `name`."""
    inner, original = innermost(copy), innermost(function)
    assert inner is not None
    assert original is not None
    # The dictionary of globals must stay the same object for CPython's inline caches.
    inner.__globals__.update({**original.__globals__, name: inner.__globals__[name]})


def _cell(function: types.FunctionType) -> int | None:
    """Return the index of the decorated function in a decorator's closure; None if it is not there."""
    inner = getattr(function, "__wrapped__", None)
    if not isinstance(inner, types.FunctionType):
        return None
    cells = function.__closure__ or ()
    return next((at for at, cell in enumerate(cells) if _content(cell) is inner), None)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None
