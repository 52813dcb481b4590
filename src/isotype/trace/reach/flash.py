"""A replacement of transformers' FlashAttention that runs on a CPU in any dtype, with the same rules for masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from isotype.compat.transformers import attention_of, set_attention

NAME = "isotype_flash"


def use_stand_in(model: nn.Module) -> None:
    """Replace attention that cannot run on a CPU: FlashAttention by `_forward`, FlexAttention (no backward) by eager.

    The masks follow `flash_attention_mask` in transformers/masking_utils.py and `_flash_attention_forward` in
    transformers/modeling_flash_attention_utils.py (5.23).
    """
    with_flash = []
    for config in configs_of(model):
        kernel = attention_of(config) or ""
        if kernel == "flex_attention":
            set_attention(config, "eager")
        elif kernel.startswith("isotype") and kernel != NAME:
            set_attention(
                config, "sdpa"
            )  # with the same masks; isotype's attention would time its kernels first
        elif "flash" in kernel:
            with_flash.append(config)
    if not with_flash:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    for config in with_flash:
        set_attention(config, NAME)


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configs of a model's modules, every config once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if config is not None}.values())


def _forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of `[rows, heads, tokens, size]`; the result is `[rows, tokens, heads, size]`."""
    rows, _heads, queries, _size = query.shape
    keys = key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query_at, key_at = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
    near = torch.ones(queries, keys, dtype=torch.bool)
    if causal and queries > 1:
        near &= key_at <= query_at
    if sliding_window is not None:
        near &= (query_at - key_at).abs() < sliding_window
    visible = near.expand(rows, 1, queries, keys)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, -keys:].bool()
    elif (sequence := _sequences(rows, keys, cu_seq_lens_q, position_ids)) is not None:
        visible = visible & (sequence[:, None, -queries:, None] == sequence[:, None, None, :])
    bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(query, key, value, bias, scale=scaling).transpose(1, 2), None


def _sequences(
    rows: int, tokens: int, starts: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the index of each token's sequence, `[rows, tokens]`; None if the inputs separate no sequences.

    As in transformers, positions that start again separate sequences only in a batch of one row.
    """
    if starts is not None and rows == 1:
        return torch.searchsorted(starts.flatten()[1:], torch.arange(tokens), right=True)[None]
    if positions is None or rows != 1 or positions.shape[-1] != tokens or positions.dim() != 2:
        return None
    if bool((torch.arange(tokens) + positions.min() == positions).all()):
        return None
    return (positions == 0).long().cumsum(-1)
