"""Swap a module's class for a subclass of it: another forward under the same name, parameters and children.

As `torch.nn.utils.parametrize` and FSDP2 do it: `isinstance`, `deepcopy`, pickle and fully qualified names keep working,
and the swap can be taken away again. And copies of functions that find something else under a name of their module.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from isotype.compat.accelerate import FORWARD_BEFORE


class Swapped:
    """Marks the classes made here.

    Attributes:
        original: the class that was swapped.
        made_by: the function that makes the class, and its arguments.
    """

    original: type[nn.Module]
    made_by: tuple[Callable[..., Any], tuple[Any, ...]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Whoever builds a module of the same class as this one (`type(model)(config)`) gets one of the original class.
        base = self.original
        self.__class__ = base  # type: ignore[assignment]
        base.__init__(self, *args, **kwargs)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The state as the module's own class gives it: recurrent layers leave weak references out.
        return _rebuild, type(self).made_by, self.__getstate__()


def swapped_class(
    marker: type[Swapped],
    made_by: tuple[Callable[..., Any], tuple[Any, ...]],
    base: Any,
    members: Mapping[str, Callable[..., Any]],
    **attributes: Any,
) -> Any:
    """A subclass of `marker` and `base` whose methods named in `members` are those, with the signatures of the base's."""
    own = {name: _like(member, getattr(base, name)) for name, member in members.items()}
    names = {"original": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (marker, base), {**names, **attributes, **own, "made_by": made_by})


def _like(member: Any, original: Any) -> Callable[..., Any]:
    """`member` with the signature and the docstring of what it stands for: trainers look up a forward's arguments."""
    own = types.FunctionType(
        member.__code__, member.__globals__, member.__name__, member.__defaults__, member.__closure__
    )
    return functools.wraps(original)(own)


def swap(module: nn.Module, cls: Any) -> None:
    """Give `module` the class `cls`: one made by `swapped_class`, or the original one."""
    module.__class__ = cls
    for name in ("forward", FORWARD_BEFORE):  # accelerate's hooks keep the method that they call
        method = module.__dict__.get(name)
        if isinstance(method, types.MethodType) and method.__self__ is module:
            module.__dict__[name] = types.MethodType(cls.forward, module)


def _rebuild(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    cls = make(*arguments)
    return cls.__new__(cls)


def globals_of(function: types.FunctionType) -> set[str] | None:
    """Names of its module that a function reads; None where a copy would not do the same: it is decorated, or writes to such names."""
    steps = [(step.opname, str(step.argval)) for step in dis.get_instructions(function)]
    writes = any(operator in ("STORE_GLOBAL", "DELETE_GLOBAL") for operator, _ in steps)
    if writes or hasattr(function, "__wrapped__"):
        return None
    return {name for operator, name in steps if operator == "LOAD_GLOBAL"}


def with_global(function: types.FunctionType, name: str, value: Any) -> types.FunctionType:
    """A copy of a function that finds `value` under a name of its module, which stays as it is."""
    names = {**function.__globals__, name: value}
    code, defaults = function.__code__, function.__defaults__
    copy = types.FunctionType(code, names, function.__name__, defaults, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    return copy


def see_module(copy: types.FunctionType, function: types.FunctionType, name: str) -> None:
    """Let a copy by `with_global` find everything else as the function's module has it now."""
    # One dictionary of names stays, so that CPython's inline caches stay valid.
    copy.__globals__.update({**function.__globals__, name: copy.__globals__[name]})
