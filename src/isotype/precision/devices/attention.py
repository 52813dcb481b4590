"""The attention kernel that torch selects on an NVIDIA GPU in `scaled_dot_product_attention`.

From aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.10 to 2.14), in the order of
`priority_order`: cuDNN's kernel comes first on Hopper and Blackwell's large GPUs (capability 9.x and 10.x,
with cuDNN 9.15.1 or later, as in torch's builds for CUDA 13), and supports masks of any float dtype and
grouped heads in 16 bits. FlashAttention supports grouped heads but no mask, from capability 8.0 on. The
memory-efficient kernel supports masks and older GPUs, and grouped heads from torch 2.14 on. All other calls
use plain operators (`math`), which materialize all scores in float32. Other devices are not covered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from isotype.precision.devices.profile import DeviceProfile

Kernel = Literal["flash", "efficient", "cudnn", "math"]
Release = tuple[int, int]

RELEASE: Release = tuple(map(int, torch.__version__.split(".")[:2]))  # type: ignore[assignment]
"""(major, minor) of the installed torch."""

_AMPERE = (8, 0)
_HOPPER = (9, 0)
_FLASH_HEAD = 256
_CUDNN_MAJORS = (9, 10)
_CUDNN_HEAD = 128
_CUDNN_PAIRS: tuple[tuple[tuple[int, int], Release], ...] = (((192, 128), (2, 10)), ((256, 256), (2, 14)))
"""Additional (query, value) head sizes of cuDNN and their first release: of multi-head latent attention, and 256."""
_GROUPED_EFFICIENT: Release = (2, 14)
"""First release whose memory-efficient kernel takes grouped heads
(https://github.com/pytorch/pytorch/pull/191085).
"""
_ALIGNED = 16
"""Row alignment of the memory-efficient kernel in bytes."""

CUDNN_TILE = 128
_NAN_RELEASES: tuple[Release, Release] = ((2, 11), (2, 14))
"""First and last torch release with a cuDNN (before 9.26) whose backward may return NaN."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention.

    Attributes:
        dtype: of queries, keys and values.
        heads: of the queries.
        key_heads: of keys and values.
        sizes: head dimensions of queries, keys and values.
        masked: whether it has a mask.
    """

    dtype: torch.dtype
    heads: int
    key_heads: int
    sizes: tuple[int, int, int]
    masked: bool = False


def attention_kernel(
    profile: DeviceProfile, call: AttentionCall, release: Release = RELEASE, *, cudnn: bool = True
) -> Kernel | None:
    """Return the kernel for a call on an NVIDIA GPU in a torch release; None for unknown devices.

    `cudnn`: whether cuDNN's kernel is enabled (`isotype.compat.torch.cudnn_is_on` for this process).
    """
    if not _is_known(profile) or profile.capability is None:
        return None
    if cudnn and _is_cudnns(profile, call, release):
        return "cudnn"
    same = len(set(call.sizes)) == 1 and call.sizes[0] <= _FLASH_HEAD
    if same and not call.masked and call.dtype in profile.flash_attention:
        return "flash"
    query, key, value = (size * call.dtype.itemsize for size in call.sizes)
    aligned = query == key and not (query % _ALIGNED or value % _ALIGNED)
    grouped = call.heads != call.key_heads
    fits = call.dtype in _efficient(profile) and aligned and not (grouped and release < _GROUPED_EFFICIENT)
    return "efficient" if fits else "math"


def needs_repeated_heads(profile: DeviceProfile, dtype: torch.dtype, release: Release = RELEASE) -> bool:
    """Return whether grouped heads have a fused kernel only after repeating keys and values per query head."""
    without = _is_known(profile) and dtype not in profile.flash_attention and dtype in _efficient(profile)
    return without and release < _GROUPED_EFFICIENT


def has_faulty_cudnn(profile: DeviceProfile, release: Release = RELEASE) -> bool:
    """Return whether a torch release has a cuDNN whose attention may return NaN on a GPU (`may_return_nan`)."""
    first, last = _NAN_RELEASES
    return profile.kind == "cuda" and profile.capability == _HOPPER and first <= release <= last


def may_return_nan(profile: DeviceProfile, call: AttentionCall, release: Release = RELEASE) -> bool:
    """Return whether the backward may give NaN query gradients, at lengths of 64 more than a multiple of 128.

    cuDNN before 9.26 does on Hopper with a mask if all scores of a row are below -88
    (https://github.com/pytorch/pytorch/issues/196678); later torch releases ship a later one.
    """
    faulty = call.masked and has_faulty_cudnn(profile, release)
    return faulty and attention_kernel(profile, call, release) == "cudnn"


def _is_known(profile: DeviceProfile) -> bool:
    return profile.kind == "cuda" and profile.capability is not None


def _is_cudnns(profile: DeviceProfile, call: AttentionCall, release: Release) -> bool:
    assert profile.capability is not None, "asked of GPUs whose capability is known"
    if profile.capability[0] not in _CUDNN_MAJORS or call.dtype not in profile.flash_attention:
        return False
    query, key, value = call.sizes
    paired = any((query, value) == pair and release >= since for pair, since in _CUDNN_PAIRS)
    return query == key and (max(call.sizes) <= _CUDNN_HEAD or paired) and not (query % 8 or value % 8)


def _efficient(profile: DeviceProfile) -> frozenset[torch.dtype]:
    assert profile.capability is not None, "asked of GPUs whose capability is known"
    older = frozenset({torch.float32, torch.float16})
    return older | {torch.bfloat16} if profile.capability >= _AMPERE else older
