"""The number of torch's threads on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 1 << 22
"""Number of elements up to which a tensor is read on one thread."""


@contextmanager
def one_thread(small: bool = True) -> Iterator[None]:
    """Use one thread in the `with` block if `small` is True: on busy cores, several threads may be slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
