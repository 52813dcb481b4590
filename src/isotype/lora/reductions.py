"""float32 accumulation of 16-bit matrix products on NVIDIA and AMD GPUs during training.

cuBLAS may split a long sum over several thread blocks and add their parts in 16 bits, which torch allows by
default (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`, and the one for float16;
https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html). Adapters' products, with few columns and
long sums, are the ones split.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SWITCHES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextmanager
def float32_reductions() -> Iterator[None]:
    """Forbid reduced-precision reductions in this process inside; restore the settings on exit."""
    matmul: Any = torch.backends.cuda.matmul
    before = {name: _allowed(matmul, name) for name in _SWITCHES}
    for name, allowed in before.items():
        setattr(matmul, name, (False, allowed[1]) if isinstance(allowed, tuple) else False)
    try:
        yield
    finally:
        for name, allowed in before.items():
            setattr(matmul, name, allowed)


def _allowed(matmul: Any, name: str) -> bool | tuple[bool, bool]:
    """Return (reduced precision allowed, split-k allowed); the first alone for torch 2.10 without the second."""
    reduced = bool(getattr(matmul, name))
    try:
        return reduced, bool(getattr(matmul, f"{name}_split_k"))
    except AttributeError:
        return reduced
