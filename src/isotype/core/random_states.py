"""The random states of Python, NumPy and torch's CPU, kept as they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_states_kept() -> Iterator[None]:
    """What draws within it moves nothing that is drawn afterwards."""
    import numpy

    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)
