"""triton: what its bindings print when a process ends."""

from __future__ import annotations

import gc
import sys

_REPORTING = (3, 9)
"""First release whose bindings are built with nanobind, which prints all objects that a process has not freed:
https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def leave_garbage() -> None:
    """Skip the garbage collection at the end of this process, unless triton would print the objects that remain."""
    triton = sys.modules.get("triton")
    if triton is None or tuple(map(int, triton.__version__.split(".")[:2])) < _REPORTING:
        gc.freeze()
