"""Attributes of other libraries that are replaced for a time, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


class Replacements:
    """Functions of other libraries that ours stand around, until `put_back`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def wrap(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Let `wrapper(original, *args, **kwargs)` run in the place of `holder.name(*args, **kwargs)`."""
        original = getattr(holder, name)
        self._before.append((holder, name, original))

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(holder, name, wrapped)

    def put_back(self) -> None:
        """Everything is as it was, the last first."""
        while self._before:
            setattr(*self._before.pop())


class MethodsOfOne:
    """Methods of one object that ours stand around, until `put_back`; its class stays as it is.

    A method that something has replaced on the object already is left alone.
    """

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._names: list[str] = []

    def wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        """Let `wrapper(method, *args, **kwargs)` run in the place of `holder.name(*args, **kwargs)`."""
        if name in vars(self._holder):
            return
        method = getattr(self._holder, name)

        @wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(method, *args, **kwargs)

        setattr(self._holder, name, wrapped)
        self._names.append(name)

    def put_back(self) -> None:
        """The object has the methods of its class again."""
        while self._names:
            vars(self._holder).pop(self._names.pop(), None)


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
