"""Attention as the simulated device computes it: the kernel that torch takes on this CPU says nothing about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from isotype.core.dtypes import dtype_name
from isotype.core.units import format_bytes
from isotype.precision.devices.attention import AttentionCall, attention_kernel, needs_repeated_heads
from isotype.precision.devices.profile import DeviceProfile

_LEAST_SHARE, _LEAST = 0.01, 1 << 20
"""Scores of a layer below this share of the step's peak, or these bytes, are no note: without them little would be won."""


class Attention:
    """Runs attention by plain operators where the device has no fused kernel for a call, and remembers the scores.

    Args:
        profile: of the device.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._scores: dict[tuple[torch.dtype, bool], int] = {}

    @contextmanager
    def as_on_device(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], autocast: torch.dtype | None
    ) -> Iterator[None]:
        """For a call of a torch function; of any but attention, nothing changes."""
        call = None if func is not scaled_dot_product_attention else _call_of(args, kwargs, autocast)
        if call is None or attention_kernel(self._profile, call[0]) != "math":
            yield
            return
        described, scores = call
        key = described.dtype, described.heads != described.key_heads
        self._scores[key] = max(self._scores.get(key, 0), scores)
        with attention.sdpa_kernel(SDPBackend.MATH):
            yield

    def notes(self, peak: int) -> Iterator[str]:
        """A line for each kind of calls that no fused kernel of the device takes and whose scores count beside the step's peak in bytes."""
        for (dtype, grouped), scores in self._scores.items():
            if scores < max(_LEAST, _LEAST_SHARE * peak):
                continue
            title, name = self._profile.title, dtype_name(dtype)
            how = f"{format_bytes(scores)} of scores are written out for a layer's attention: on {title} no fused kernel takes"
            if grouped and needs_repeated_heads(self._profile, dtype):
                yield f"{how} grouped heads in {name}; where layers are fused (--fuse, isotype.fuse), keys and values are repeated instead"
            else:
                yield f"{how} these heads in {name}"


def _call_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], autocast: torch.dtype | None
) -> tuple[AttentionCall, int] | None:
    """(the call, bytes of its scores in the dtype that plain operators sum in); None for shapes that torch refuses itself."""
    named: dict[str, Any] = {
        **dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)),
        **kwargs,
    }
    query, key, value = (named.get(name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or {query.dim(), key.dim(), value.dim()} != {4}:
        return None
    dtype: torch.dtype = query.dtype if autocast is None or query.dtype == torch.float64 else autocast
    sizes = query.shape[-1], key.shape[-1], value.shape[-1]
    call = AttentionCall(dtype, query.shape[1], key.shape[1], sizes, named.get("attn_mask") is not None)
    width = max(dtype.itemsize, torch.float32.itemsize)
    return call, query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * width
