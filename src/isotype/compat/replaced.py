"""Attributes of other libraries that are replaced for a time, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any


class Replacements:
    """Functions of other libraries, or methods of one object, that ours stand around, until `put_back`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Let `wrapper(original, *args, **kwargs)` run in the place of `holder.name(*args, **kwargs)`."""
        original, held = getattr(holder, name), name in vars(holder)
        self._undo.append(
            partial(setattr, holder, name, original) if held else partial(delattr, holder, name)
        )

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(holder, name, wrapped)

    def put_back(self) -> None:
        """Everything is as it was, the last first."""
        while self._undo:
            self._undo.pop()()


@contextmanager
def replaced(holder: Any, name: str, new: Any) -> Iterator[None]:
    """Within it `holder.name` is `new`; where there is no holder, or it has no such attribute, nothing changes."""
    if holder is None or not hasattr(holder, name):
        yield
        return
    before = getattr(holder, name)
    setattr(holder, name, new)
    try:
        yield
    finally:
        setattr(holder, name, before)
