"""The switches of torch's attention kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def enabled_attention() -> frozenset[str]:
    """Return the enabled attention kernels: all, except inside of `torch.nn.attention.sdpa_kernel` and similar switches."""
    cuda = torch.backends.cuda
    switches = {
        "cudnn": cuda.cudnn_sdp_enabled,
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
        "math": cuda.math_sdp_enabled,
    }
    return frozenset(name for name, is_on in switches.items() if is_on())  # type: ignore[no-untyped-call]


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN's attention kernel inside the `with` block."""
    was_on = "cudnn" in enabled_attention()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)
