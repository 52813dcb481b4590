"""Which kernel torch's attention takes for a call on an NVIDIA GPU, by the conditions of `scaled_dot_product_attention`.

From aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.10 to 2.13), in the order of `priority_order`: cuDNN's kernel comes
first on Hopper and Blackwell's large GPUs (capability 9.x and 10.x, with cuDNN 9.15.1 or later, as torch's builds for CUDA 13 have), and takes
masks of any float dtype and grouped heads in 16 bits. FlashAttention takes grouped heads and no mask, on compute capability 8.0 and later.
The memory-efficient kernel takes masks and older GPUs, in these releases no grouped heads. What none takes goes to plain operators
(`math`), which write out all scores in float32. Of other devices nothing is known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from isotype.precision.devices.profile import DeviceProfile

Kernel = Literal["flash", "efficient", "cudnn", "math"]

_AMPERE = (8, 0)
_FLASH_HEAD = 256
_CUDNN_MAJORS = (9, 10)
_CUDNN_HEAD = 128
_CUDNN_PAIR = (192, 128)
"""Sizes of a head of queries and of values that cuDNN takes besides: those of multi-head latent attention."""
_ALIGNED = 16
"""Bytes that rows of the memory-efficient kernel are a multiple of."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention.

    Attributes:
        dtype: of queries, keys and values.
        heads: of the queries.
        key_heads: of keys and values.
        sizes: numbers of a head of queries, keys and values.
        masked: whether a mask is given.
    """

    dtype: torch.dtype
    heads: int
    key_heads: int
    sizes: tuple[int, int, int]
    masked: bool = False


def attention_kernel(profile: DeviceProfile, call: AttentionCall) -> Kernel | None:
    """The kernel that a call takes on an NVIDIA GPU; None where nothing is known of the device."""
    if not _is_known(profile) or profile.capability is None:
        return None
    if _is_cudnns(profile, call):
        return "cudnn"
    if not call.masked and call.dtype in profile.flash_attention and _same_sizes(call, at_most=_FLASH_HEAD):
        return "flash"
    query, key, value = (size * call.dtype.itemsize for size in call.sizes)
    aligned = query == key and not (query % _ALIGNED or value % _ALIGNED)
    fits = call.dtype in _efficient(profile) and call.heads == call.key_heads and aligned
    return "efficient" if fits else "math"


def needs_repeated_heads(profile: DeviceProfile, dtype: torch.dtype) -> bool:
    """Whether grouped heads have a fused kernel only when keys and values are repeated for each head of the queries."""
    return _is_known(profile) and dtype not in profile.flash_attention and dtype in _efficient(profile)


def _is_known(profile: DeviceProfile) -> bool:
    return profile.kind == "cuda" and profile.capability is not None


def _is_cudnns(profile: DeviceProfile, call: AttentionCall) -> bool:
    assert profile.capability is not None, "asked of GPUs whose capability is known"
    if profile.capability[0] not in _CUDNN_MAJORS or call.dtype not in profile.flash_attention:
        return False
    query, key, value = call.sizes
    sized = max(call.sizes) <= _CUDNN_HEAD or (query, value) == _CUDNN_PAIR
    return query == key and sized and not (query % 8 or value % 8)


def _efficient(profile: DeviceProfile) -> frozenset[torch.dtype]:
    assert profile.capability is not None, "asked of GPUs whose capability is known"
    older = frozenset({torch.float32, torch.float16})
    return older | {torch.bfloat16} if profile.capability >= _AMPERE else older


def _same_sizes(call: AttentionCall, at_most: int) -> bool:
    return len(set(call.sizes)) == 1 and call.sizes[0] <= at_most
