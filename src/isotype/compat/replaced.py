"""Reads, sets and replaces attributes of other libraries' modules, classes and objects."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any


def reads(name: str, default: Any = None) -> Callable[[Any], Any]:
    """Return a function that returns the attribute `name` of an object, or `default` if it is None or missing."""

    def read(holder: Any) -> Any:
        value = getattr(holder, name, None)
        return default if value is None else value

    return read


def sets(name: str) -> Callable[[Any, Any], None]:
    return lambda holder, value: setattr(holder, name, value)


def replace(holder: Any, name: str, new: Any) -> Callable[[], None]:
    """Set the attribute `name` of `holder` to `new`. Return a function that restores it."""
    is_own = name in vars(holder)  # otherwise `holder` inherits it
    undo = partial(setattr, holder, name, vars(holder)[name]) if is_own else partial(delattr, holder, name)
    setattr(holder, name, new)
    return undo


class Replacements(ExitStack):
    """Replaces functions and methods by wrappers, until `close` or the end of a `with` block."""

    def wrap(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace `holder.name` by a function that calls `wrapper(original, *args, **kwargs)`."""
        original = getattr(holder, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self.callback(replace(holder, name, wrapped))


@contextmanager
def replaced(holder: Any, name: str, new: Any) -> Iterator[None]:
    """In the `with` block, `holder.name` is `new`. Do nothing if `holder` is None or has no such attribute."""
    with ExitStack() as stack:
        if hasattr(holder, name):
            stack.callback(replace(holder, name, new))
        yield
