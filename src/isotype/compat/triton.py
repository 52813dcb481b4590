"""triton: prevents the list of leaked objects that its bindings may print when a process ends."""

from __future__ import annotations

import gc
import sys

_REPORTING = (3, 9)
"""First release with nanobind. At the end of a process, nanobind prints all objects that have not been freed:
https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def leave_garbage() -> None:
    """Skip the garbage collection at the end of this process, unless triton would print the objects that remain."""
    triton = sys.modules.get("triton")
    if triton is None or tuple(map(int, triton.__version__.split(".")[:2])) < _REPORTING:
        gc.freeze()
