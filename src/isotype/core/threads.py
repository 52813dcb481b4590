"""The number of torch's threads on the CPU, and functions that run in one of Python's threads at a time."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
_BUILDING = threading.RLock()

SMALL = 1 << 22
"""Number of elements up to which a tensor is read on one thread."""


@contextmanager
def one_thread(small: bool = True) -> Iterator[None]:
    """Use one thread in the `with` block if `small` is True, because several threads may be slower on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def undisturbed(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function`, which builds a model. Only one thread at a time runs such a function, with float32 as torch's
    default dtype.

    While transformers builds a model, it changes the default dtype and functions of its classes for all threads. PEFT
    initialises weights, and bitsandbytes creates its code books, in the default dtype.
    """

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with _BUILDING:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            try:
                return function(*args, **kwargs)
            finally:
                torch.set_default_dtype(before)

    return alone
