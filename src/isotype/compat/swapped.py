"""Swap a module's class for a subclass of it: another forward under the same name, parameters and children.

As `torch.nn.utils.parametrize` and FSDP2 do it: `isinstance`, `deepcopy`, pickle and fully qualified names keep working,
and the swap can be taken away again.
"""

from __future__ import annotations

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
