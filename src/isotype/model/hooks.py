"""Hooks that only listen: a module may compute along another way, on which they are not called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Hook = TypeVar("_Hook", bound=Callable[..., Any])

_LISTENS = "_isotype_listens"


def listening(hook: _Hook) -> _Hook:
    """`hook`, marked as one that changes nothing of what goes through a module and may be left out."""
    hook.__dict__[_LISTENS] = True
    return hook


def must_be_called(hooks: Mapping[int, Any]) -> bool:
    """Whether one of a module's hooks may change what the module takes or returns, or is not ours to leave out."""
    return any(not getattr(hook, _LISTENS, False) for hook in hooks.values())
