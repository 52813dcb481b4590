"""The number of torch's threads on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 1 << 22
"""Number of elements up to which a tensor is read on one thread."""


@contextmanager
def one_thread(small: bool = True) -> Iterator[None]:
    """In the `with` block, use one thread if `small`: on busy cores, threads wait long for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
