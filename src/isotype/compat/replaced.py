"""Replaces attributes of other libraries' modules, classes and objects for a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any


def replace(holder: Any, name: str, new: Any) -> Callable[[], None]:
    """Set the attribute `name` of `holder` to `new`. Return a function that restores it."""
    held = name in vars(holder)  # otherwise `holder` inherits it
    undo = partial(setattr, holder, name, vars(holder)[name]) if held else partial(delattr, holder, name)
    setattr(holder, name, new)
    return undo


class Replacements:
    """Replaces functions and methods by wrappers until `put_back`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace `holder.name` by a function that calls `wrapper(original, *args, **kwargs)`."""
        original = getattr(holder, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self._undo.append(replace(holder, name, wrapped))

    def put_back(self) -> None:
        """Undo all replacements in reverse order."""
        while self._undo:
            self._undo.pop()()


@contextmanager
def replaced(holder: Any, name: str, new: Any) -> Iterator[None]:
    """In the `with` block, `holder.name` is `new`. Do nothing if `holder` is None or has no such attribute."""
    if holder is None or not hasattr(holder, name):
        yield
        return
    undo = replace(holder, name, new)
    try:
        yield
    finally:
        undo()
