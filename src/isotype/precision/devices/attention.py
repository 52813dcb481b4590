"""The attention kernel that torch chooses on an NVIDIA GPU in `scaled_dot_product_attention`.

The rules are the same as in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.10 to 2.15), in the order
of `priority_order`:

1. cuDNN's kernel on Hopper and large Blackwell GPUs (capability 9.x and 10.x, with cuDNN 9.15.1 or later, as in
   torch's builds for CUDA 13). This kernel supports masks of any float dtype, and grouped heads in 16 bits.
2. FlashAttention, from capability 8.0 on. FlashAttention supports grouped heads but no mask.
3. The memory-efficient kernel, also on older GPUs. This kernel supports masks, and grouped heads from torch 2.14 on.
4. Plain operators (`math`), which materialize all scores in float32.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch

from isotype.precision.devices.profile import DeviceProfile

Kernel = Literal["flash", "efficient", "cudnn", "math", "none"]
KERNELS = frozenset({"flash", "efficient", "cudnn", "math"})
Release = tuple[int, int]

RELEASE: Release = tuple(map(int, torch.__version__.split(".")[:2]))  # type: ignore[assignment]

_HOPPER = (9, 0)
_FLASH_HEAD = 256
_CUDNN_MAJORS = (9, 10)
_CUDNN_HEAD = 128
_CUDNN_PAIRS: tuple[tuple[tuple[int, int], Release], ...] = (((192, 128), (2, 10)), ((256, 256), (2, 14)))
"""(query, value) head sizes above `_CUDNN_HEAD` that cuDNN's kernel supports, each with its first torch release."""
_GROUPED_EFFICIENT: Release = (2, 14)
"""First release with grouped heads in the memory-efficient kernel (https://github.com/pytorch/pytorch/pull/191085)."""
_ALIGNED = 16
"""The memory-efficient kernel needs rows that are aligned to this number of bytes."""

CUDNN_TILE = 128
_NAN_RELEASES: tuple[Release, Release] = ((2, 11), (2, 14))
"""First and last torch release with a cuDNN before 9.26; see `may_return_nan`."""
_MISREAD_MASKS: Release = (2, 13)
"""Last torch release in which cuDNN's kernel assumes that a mask has the queries' dtype; see `misreads_masks`."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention.

    Attributes:
        sizes: head dimensions of queries, keys and values.
    """

    dtype: torch.dtype
    heads: int
    key_heads: int
    sizes: tuple[int, int, int]
    masked: bool = False


def enabled_attention() -> frozenset[str]:
    """Return the enabled attention kernels. `torch.nn.attention.sdpa_kernel` and similar functions disable some kernels."""
    cuda = torch.backends.cuda
    switches = {
        "cudnn": cuda.cudnn_sdp_enabled,
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
        "math": cuda.math_sdp_enabled,
    }
    return frozenset(name for name, is_on in switches.items() if is_on())  # type: ignore[no-untyped-call]


def attention_kernel(
    profile: DeviceProfile, call: AttentionCall, release: Release = RELEASE, enabled: Set[str] = KERNELS
) -> Kernel | None:
    """Return the kernel that a torch release uses: one of `enabled`, or "none". Return None if the device is not an NVIDIA GPU."""
    if profile.kind != "cuda":
        return None
    if "cudnn" in enabled and _is_by_cudnn(profile, call, release):
        return "cudnn"
    same = len(set(call.sizes)) == 1 and call.sizes[0] <= _FLASH_HEAD
    if "flash" in enabled and same and not call.masked and call.dtype in profile.flash_attention:
        return "flash"
    query, key, value = (size * call.dtype.itemsize for size in call.sizes)
    aligned = query == key and not (query % _ALIGNED or value % _ALIGNED)
    grouped = call.heads != call.key_heads
    fits = call.dtype in _efficient(profile) and aligned and not (grouped and release < _GROUPED_EFFICIENT)
    if fits and "efficient" in enabled:
        return "efficient"
    return "math" if "math" in enabled else "none"


def needs_repeated_heads(profile: DeviceProfile, dtype: torch.dtype, release: Release = RELEASE) -> bool:
    """Return True if grouped heads must be repeated, because torch has no fused kernel for them on this GPU in `dtype`."""
    without = profile.kind == "cuda" and dtype not in profile.flash_attention and dtype in _efficient(profile)
    return without and release < _GROUPED_EFFICIENT


def has_faulty_cudnn(profile: DeviceProfile, release: Release = RELEASE) -> bool:
    """Return True if a torch release has a cuDNN that may return NaN on this GPU (see `may_return_nan`)."""
    first, last = _NAN_RELEASES
    return profile.kind == "cuda" and profile.capability == _HOPPER and first <= release <= last


def may_return_nan(profile: DeviceProfile, call: AttentionCall, release: Release = RELEASE) -> bool:
    """Return True if the gradients of queries may be NaN for a sequence length of 128 n + 64.

    On Hopper, cuDNN before 9.26 returns NaN for a call with a mask if all scores of a row are below -88:
    https://github.com/pytorch/pytorch/issues/196678. Newer torch releases have a newer cuDNN.
    """
    faulty = call.masked and has_faulty_cudnn(profile, release)
    return faulty and attention_kernel(profile, call, release) == "cudnn"


def misreads_masks(profile: DeviceProfile, call: AttentionCall, release: Release = RELEASE) -> bool:
    """Return whether the kernel reads a mask of any dtype as if it had the queries' dtype.

    See https://github.com/pytorch/pytorch/pull/191612. From torch 2.14 on, the kernel reads float32 masks correctly.
    """
    return release <= _MISREAD_MASKS and attention_kernel(profile, call, release) == "cudnn"


def _is_by_cudnn(profile: DeviceProfile, call: AttentionCall, release: Release) -> bool:
    major, _ = profile.capability or (0, 0)
    if major not in _CUDNN_MAJORS or call.dtype not in profile.flash_attention:
        return False
    query, key, value = call.sizes
    paired = any((query, value) == pair and release >= since for pair, since in _CUDNN_PAIRS)
    return query == key and (max(call.sizes) <= _CUDNN_HEAD or paired) and not (query % 8 or value % 8)


def _efficient(profile: DeviceProfile) -> frozenset[torch.dtype]:
    return frozenset({torch.float32, torch.float16}) | (profile.native & {torch.bfloat16})
