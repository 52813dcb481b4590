"""Fourier transforms in float16: a CPU has none, a GPU has some (`promote_type_fft` in torch's SpectralOps.cpp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

HALF_TRANSFORMS = frozenset({"cuda", "xpu"})
"""Kinds of devices with transforms in float16; "cuda" has them for some sizes, ROCm has none."""
_HALVES = {torch.float32: torch.float16, torch.complex64: torch.complex32}


def is_half_transform(name: str, args: Sequence[Any]) -> bool:
    """Return whether the function `name` (`fft_rfft`) transforms a float16 tensor."""
    return name.startswith("fft_") and bool(args) and args[0].dtype == torch.float16


def transformed_sizes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the sizes of the signal that a function of `torch.fft` transforms."""
    given = {**dict(zip(("input", "n", "dim"), args, strict=False)), **kwargs}
    sizes, dims = given.get("n", given.get("s")), given.get("dim")
    if sizes is not None:
        return [sizes] if isinstance(sizes, int) else list(sizes)
    if dims is None:
        dims = (-2, -1) if name.endswith("2") else range(args[0].dim()) if name.endswith("n") else -1
    return [args[0].shape[dim] for dim in ([dims] if isinstance(dims, int) else dims)]


def as_half(leaf: Any) -> Any:
    """Return a result of a transform in float32 as the transform in float16 returns it."""
    return leaf.to(_HALVES[leaf.dtype]) if isinstance(leaf, torch.Tensor) else leaf
