"""Torch's attention with keys and values repeated before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class _Ungrouped:
    """The attributes of an attention layer without grouped heads that `sdpa_attention_forward` reads."""

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
    """Transformers' `sdpa` with keys and values repeated for each head of the queries, where transformers would leave that to torch.

    It leaves it to torch where there is no mask, and on GPUs without FlashAttention (torch up to 2.13) torch's plain operators then compute
    all scores in float32. Calls with a mask, of one query or with a cache of pages are transformers' own. Arguments and results as of
    `isotype.lora.attention.registered.attention_forward`.
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
