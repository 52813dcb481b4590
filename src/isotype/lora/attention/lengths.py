"""Attention of concatenated rows by FlashAttention's kernel for varying lengths, which computes no padding.

`torch.nn.attention.varlen.varlen_attn` (torch 2.11 with a scale and windows) takes 16-bit queries, keys and
values `[tokens, heads, head]` on NVIDIA GPUs of compute capability 8.0 and later, with grouped heads, causal
attention, windows and a backward. It has no dropout, soft cap or bias, and one head size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from isotype.core.dtypes import dtype_name
from isotype.lora.unpadded import Sequences, current
from isotype.precision.devices.profile import DeviceProfile

DTYPES = (torch.float16, torch.bfloat16)
_MOST_HEAD = 256
_ALIGNED = 8
"""Head sizes are multiples of this."""
_SINCE = "2.11"
_CHANGES = ("softcap", "s_aux", "sinks", "indices", "block_indices", "cache", "head_mask", "position_bias")
"""Keyword arguments of layers that change the result."""


def takes_lengths() -> bool:
    """Return whether torch's function has a scale and windows, by version: importing it imports torch's compiler."""
    return torch.__version__ >= _SINCE


@cache
def varlen_attention() -> Any:
    """Return torch's function; requires `takes_lengths`."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def why_not_lengths(profile: DeviceProfile, dtype: torch.dtype, config: Any) -> str | None:
    """Return why a device, compute dtype or model config excludes this kernel, as a clause; None if none does."""
    if profile.kind != "cuda":
        return f"attention by lengths is for NVIDIA GPUs, and this is {profile.title}"
    if dtype not in profile.flash_attention or dtype not in DTYPES:
        return f"{profile.title} has no FlashAttention in {dtype_name(dtype)}"
    if not takes_lengths():
        return f"torch {torch.__version__} has no attention by lengths with a scale and windows"
    rates = {name: value for name, value in config.to_dict().items() if "drop" in name and "att" in name}
    if dropped := [name for name, value in rates.items() if isinstance(value, float) and value > 0]:
        return f"attention drops scores ({', '.join(dropped)}), which attention by lengths does not"
    return None


def lengths_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Any:
    """Return the mask for a model: announced sequences themselves, else transformers' mask for `sdpa`.

    Raises NotImplementedError if the model's mask comes from its own function, which sequences do not represent.
    """
    from transformers.masking_utils import sdpa_mask

    # A compiler would have to read the context; sdpa's mask gets the same from positions.
    sequences = None if torch.compiler.is_compiling() else current()
    if sequences is None:
        return sdpa_mask(*args, local_size=local_size, **kwargs)
    if kwargs.get("use_vmap"):
        raise NotImplementedError("a mask by a function of the model's own")
    return Sequences(sequences.ends, sequences.longest, local_size)


def why_not_call(
    inputs: tuple[torch.Tensor, ...], sequences: Sequences, causal: bool, kwargs: dict[str, Any]
) -> str | None:
    """Return why a call uses a mask after all, as a clause; None if it uses lengths.

    Args:
        inputs: query, key and value `[batch, heads, tokens, head]`.
        kwargs: other arguments of the layer.
    """
    query, key, value = inputs
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return f"its inputs are {', '.join(sorted({dtype_name(x.dtype) for x in inputs}))}"
    sizes = {x.shape[-1] for x in inputs}
    if len(sizes) > 1 or max(sizes) > _MOST_HEAD or max(sizes) % _ALIGNED:
        return f"its heads have sizes {', '.join(map(str, sorted(sizes)))}"
    if len(query) != 1 or query.shape[2] != key.shape[2]:
        return "it is not of one row with as many keys as queries"
    if sequences.window is not None and not causal:
        return "it has a window and is not causal"
    if kwargs.get("dropout"):
        return "it has dropout"
    changes = [name for name in _CHANGES if kwargs.get(name) is not None]
    if changes:
        return f"it has {', '.join(changes)}"
    return None


def by_lengths(
    inputs: tuple[torch.Tensor, ...], sequences: Sequences, *, scale: float | None, causal: bool
) -> torch.Tensor:
    """Return `[1, tokens, query heads, head]` for a call without objections from `why_not_call`."""
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in inputs)
    window = sequences.window if sequences.window is not None and sequences.window < sequences.longest else 0
    grouped = {"enable_gqa": True} if "enable_gqa" in _parameters() and query.shape[1] != key.shape[1] else {}
    ends, longest, sides = sequences.ends, sequences.longest, (window - 1, 0 if causal else -1)
    sizes = (ends, ends, longest, longest)
    result: torch.Tensor = varlen_attention()(
        query, key, value, *sizes, scale=scale, window_size=sides, **grouped
    )
    return result[None]


@cache
def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(varlen_attention()).parameters)


@dataclass(frozen=True)
class _Ungrouped:
    """The attributes that `sdpa_attention_forward` reads from an attention layer without grouped heads."""

    is_causal: bool


def repeated_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Use transformers' `sdpa` with keys and values repeated for each query head, instead of grouped heads.

    It passes grouped heads to torch without a mask; on GPUs without FlashAttention (torch up to 2.13) torch then
    materializes all scores in float32. Calls with a mask, with one query or with a paged cache are unchanged.
    Arguments and results as for `isotype.lora.attention.registered.attention_forward`.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = int(getattr(module, "num_key_value_groups", 1))
    layer: Any = module
    if groups > 1 and attention_mask is None and query.shape[2] > 1 and kwargs.get("cache") is None:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        layer = _Ungrouped(bool(getattr(module, "is_causal", True)))
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        layer, query, key, value, attention_mask, is_causal=is_causal, **kwargs
    )
    return result
