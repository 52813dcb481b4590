"""Copies of module trees whose tensors come from elsewhere: fake or shared ones."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

_ATOMS = frozenset({bool, int, float, str, type(None), torch.dtype})
_HOLDERS = frozenset({dict, OrderedDict, set, list})
_SHARED = (types.ModuleType, type, torch.Generator)


def empty_copies(model: nn.Module, memo: dict[int, Any]) -> None:
    """Add an uninitialized module of the same class to `memo` for every module of `model` not in it."""
    for module in model.modules():
        # A scripted module is a C++ object and is shared.
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
    if type(value) in _HOLDERS and not value:  # most attributes of a module
        return memo.setdefault(id(value), type(value)())
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - a lock, a file, a class that refuses: shared, and put back after the trace
        return value
