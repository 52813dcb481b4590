"""Temporary replacement of attributes of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any


class Replacements:
    """Wrappers around functions or methods, until `put_back`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace `holder.name` by a function that calls `wrapper(original, *args, **kwargs)`."""
        original, held = getattr(holder, name), name in vars(holder)
        self._undo.append(
            partial(setattr, holder, name, original) if held else partial(delattr, holder, name)
        )

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(holder, name, wrapped)

    def put_back(self) -> None:
        """Undo all replacements in reverse order."""
        while self._undo:
            self._undo.pop()()


@contextmanager
def replaced(holder: Any, name: str, new: Any) -> Iterator[None]:
    """Set `holder.name` to `new` inside; no effect if the holder is None or lacks the attribute."""
    if holder is None or not hasattr(holder, name):
        yield
        return
    before = getattr(holder, name)
    setattr(holder, name, new)
    try:
        yield
    finally:
        setattr(holder, name, before)
