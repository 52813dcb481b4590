"""torch's fake process group: one process calls the collectives of several processes, without communication."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed


@contextmanager
def fake_process_group(size: int) -> Iterator[Any]:
    """Yield a one-dimensional `DeviceMesh` of `size` processes, in which this process has rank 0.

    Raises:
        ValueError: this process has a process group already.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces the hook by one that prints the rank before every line
    distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        distributed.destroy_process_group()
        sys.excepthook = hook
