"""Products of 16-bit matrices on NVIDIA and AMD GPUs are summed in float32 throughout, for as long as isotype trains.

cuBLAS may split a long sum over several blocks of threads and add their parts in 16 bits: torch allows it by default
(`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`, and the one for float16;
https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html). Adapters' products, few columns and long sums, are those that get split.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SWITCHES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextmanager
def float32_reductions() -> Iterator[None]:
    """Within, no product of this process adds parts of its sums in 16 bits; what was allowed before is allowed again after."""
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
    """(parts may be added in 16 bits, a sum may be split); torch 2.10 knows the first alone where it has no name for the second."""
    reduced = bool(getattr(matmul, name))
    try:
        return reduced, bool(getattr(matmul, f"{name}_split_k"))
    except AttributeError:
        return reduced
