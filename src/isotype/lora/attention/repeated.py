"""torch's attention with repeated keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


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
    """Use transformers' `sdpa` with keys and values repeated for each query head, where it would pass grouped
    heads to torch.

    That is the case without a mask; on GPUs without FlashAttention (torch up to 2.13) torch then materializes
    all scores in float32. Calls with a mask, with one query or with a paged cache are unchanged. Arguments
    and results as for `isotype.lora.attention.registered.attention_forward`.
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
