"""triton (3.0 to 3.9): skips kernels on fake tensors, and hides the list of leaked objects at the end of a process."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from isotype.compat.replaced import replaced

_REPORTING = (3, 9)
"""First triton release with nanobind, which prints all objects that are not freed at the end of a process:
https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def leave_garbage() -> None:
    """Skip the garbage collection at the end of this process, unless triton would print the remaining objects."""
    triton = sys.modules.get("triton")
    if triton is None or tuple(map(int, triton.__version__.split(".")[:2])) < _REPORTING:
        gc.freeze()


@contextmanager
def without_kernels(launched: Callable[[str, Any], None], fake: type) -> Iterator[None]:
    """In the `with` block, call `launched(name, arguments)` in place of each Triton kernel with a tensor of class `fake`.

    A trace does not need the kernel: a kernel returns nothing, and the tensors that it writes to already have dtypes.
    """
    interface = getattr(sys.modules.get("triton.runtime.jit"), "KernelInterface", None)
    launcher_of: Any = getattr(interface, "__getitem__", None)

    def launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            if not any(isinstance(value, fake) for value in values):
                return launcher_of(kernel, grid)(*args, **kwargs)
            return launched(getattr(kernel, "__name__", "kernel"), values)

        return launch

    with replaced(interface, "__getitem__", launcher):
        yield
