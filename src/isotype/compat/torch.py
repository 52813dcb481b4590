"""torch (2.10 to 2.13): which devices an operator has a kernel for.

`torch._C._dispatch_has_kernel_for_dispatch_key` is what torch's own tests and functorch ask; there is no public question. It knows an
operator of bitsandbytes' once bitsandbytes is imported. tests/compat/test_torch.py fails where it is gone.
"""

from __future__ import annotations

from functools import cache

import torch

_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "hpu": "HPU"}  # ROCm's is CUDA


@cache
def has_kernel(operator: str, device: str) -> bool:
    """Whether an operator (`aten::mm`) has a kernel of its own on a device type, and no composition of others alone."""
    key = _KEYS.get(device)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
