"""glibc: settings of its memory allocator."""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# <malloc.h>
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
LARGEST_KEPT = 32 << 20
"""glibc's largest mmap threshold in bytes (mallopt(3)). Larger blocks are mapped and zeroed at each allocation."""


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory in this process for the next training step, inside the `with` block.

    At the end of a step, activations are freed. If glibc returned this memory to the system, the next step would cause
    tens of thousands of page faults. There is no effect with another C library, or if the user has set `MALLOC_…` or
    `GLIBC_TUNABLES`.
    """
    set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
    set_by_user |= "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    with ExitStack() as after:
        if platform.libc_ver()[0] == "glibc" and not set_by_user:
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
            mallopt(_TRIM_THRESHOLD, _NEVER)
            after.callback(give_back_memory)
            after.callback(mallopt, _TRIM_THRESHOLD, 2 * LARGEST_KEPT)  # glibc's own choice for such blocks
        yield


def give_back_memory() -> None:
    """Make glibc return free memory to the system. Freed tensors of a few megabytes leave holes in glibc's heap."""
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(ctypes.c_size_t(0))
