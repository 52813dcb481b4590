"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# <malloc.h>
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
LARGEST_KEPT = 32 << 20
"""The largest mmap threshold that glibc takes, and the one that it comes to by itself where large blocks are freed (mallopt(3)).

A larger block comes from the system, page by page and cleared, whenever it is allocated.
"""


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep what is freed for the next block, instead of giving it to the system and asking for it again, page by page.

    A training step frees all that it has saved; glibc returns what lies at the end of its heap, and the next step pays for tens of
    thousands of new pages, each of which the system clears. At the end all is given back. Where the C library is another one, or where
    the user has set it (`MALLOC_…`, `GLIBC_TUNABLES`), nothing is changed.
    """
    if platform.libc_ver()[0] != "glibc" or _is_set():
        yield
        return
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        library.mallopt(_TRIM_THRESHOLD, 2 * LARGEST_KEPT)  # as glibc comes to it by itself
        give_back_memory()


def give_back_memory() -> None:
    """Let glibc return memory that is free: tensors of some megabytes leave holes in its heap, which only grows."""
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(ctypes.c_size_t(0))


def _is_set() -> bool:
    named = any(name.startswith("MALLOC_") for name in os.environ)
    return named or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
