"""Attention on NVIDIA GPUs: FlashAttention for concatenated rows of any length, and attention with repeated heads.

`torch.nn.attention.varlen.varlen_attn` accepts 16-bit queries, keys and values `[tokens, heads, head]` with the same
head size, on NVIDIA GPUs of compute capability 8.0 or later. `varlen_attn` supports grouped heads, causal attention
and a backward, and since torch 2.11 a scale and windows. It supports no dropout, soft cap or bias.
"""

import inspect
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from isotype.core.dtypes import HALVES, dtype_name
from isotype.lora.unpadded import Sequences, current
from isotype.precision.devices.profile import DeviceProfile

_MOST_HEAD = 256
_ALIGNED = 8
"""Head sizes must be multiples of this number."""
_SINCE = "2.11"
CHANGES = ("softcap", "s_aux", "sinks", "indices", "block_indices", "cache", "head_mask")
"""Keyword arguments that change the result of attention, and that isotype's kernels and `varlen_attn` do not support."""


def takes_lengths() -> bool:
    """Return True if this torch's `varlen_attn` has a scale and windows. The function imports nothing that would load torch's compiler."""
    return torch.__version__ >= _SINCE


@cache
def varlen_attention() -> tuple[Any, bool]:
    """Return (torch's `varlen_attn`, True if it has the option `enable_gqa`). Call this function only if `takes_lengths()` is true."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def why_not_lengths(profile: DeviceProfile, dtype: torch.dtype, config: Any) -> str | None:
    """Return a clause that says why variable-length attention is impossible; None if it is possible."""
    if profile.kind != "cuda":
        return f"variable-length attention is only for NVIDIA GPUs, but this is {profile.title}"
    if dtype not in profile.flash_attention or dtype not in HALVES:
        return f"{profile.title} has no FlashAttention in {dtype_name(dtype)}"
    if not takes_lengths():
        return f"torch {torch.__version__} has no variable-length attention with a scale and windows"
    rates = {name: value for name, value in config.to_dict().items() if "drop" in name and "att" in name}
    if dropped := [name for name, value in rates.items() if isinstance(value, float) and value > 0]:
        return f"the model's attention has dropout ({', '.join(dropped)}), but variable-length attention has none"
    return None


def lengths_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Any:
    """Return the current `Sequences` in place of a mask, or transformers' `sdpa` mask if no sequences are set.

    Raises NotImplementedError if the model has its own mask function, because sequences cannot represent this mask.
    """
    from transformers.masking_utils import sdpa_mask

    # torch.compile cannot read the context variable; sdpa's mask separates the sequences by positions.
    sequences = None if torch.compiler.is_compiling() else current()
    if sequences is None:
        return sdpa_mask(*args, local_size=local_size, **kwargs)
    if kwargs.get("use_vmap"):
        raise NotImplementedError("the model has its own mask function")
    return Sequences(sequences.ends, sequences.longest, local_size)


def why_not_call(
    inputs: tuple[torch.Tensor, ...], sequences: Sequences, causal: bool, kwargs: dict[str, Any]
) -> str | None:
    """Return a clause that says why a call needs a mask instead of sequence lengths; None if lengths are enough."""
    query, key, value = inputs
    if query.dtype not in HALVES or not query.dtype == key.dtype == value.dtype:
        return f"queries, keys and values are {', '.join(sorted({dtype_name(x.dtype) for x in inputs}))}"
    sizes = {x.shape[-1] for x in inputs}
    if len(sizes) > 1 or max(sizes) > _MOST_HEAD or max(sizes) % _ALIGNED:
        return f"heads have the sizes {', '.join(map(str, sorted(sizes)))}"
    if len(query) != 1 or query.shape[2] != key.shape[2]:
        return "the call has several rows, or not as many keys as queries"
    if sequences.window is not None and not causal:
        return "the call has a window and is not causal"
    if kwargs.get("dropout"):
        return "the call has dropout"
    changes = [name for name in (*CHANGES, "position_bias") if kwargs.get(name) is not None]
    return f"the call has the arguments {', '.join(changes)}" if changes else None


def by_lengths(
    inputs: tuple[torch.Tensor, ...], sequences: Sequences, *, scale: float | None, causal: bool
) -> torch.Tensor:
    """Return the result of attention, `[1, tokens, query heads, head]`. `why_not_call` must have returned None for this call."""
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in inputs)
    window = sequences.window if sequences.window is not None and sequences.window < sequences.longest else 0
    attend, has_groups = varlen_attention()
    grouped = {"enable_gqa": True} if has_groups and query.shape[1] != key.shape[1] else {}
    ends, longest, sides = sequences.ends, sequences.longest, (window - 1, 0 if causal else -1)
    sizes = (ends, ends, longest, longest)
    options = {"scale": scale, "window_size": sides, **grouped}
    result: torch.Tensor = attend(query, key, value, *sizes, **options)
    return result[None]


def repeated_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention by transformers' `sdpa`, with keys and values repeated for each query head.

    Without a mask, transformers passes grouped heads to torch. On GPUs without FlashAttention, torch (up to 2.13) then
    materializes all scores in float32. Arguments and results are those of `attention_forward`.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = int(getattr(module, "num_key_value_groups", 1))
    layer: Any = module
    if groups > 1 and attention_mask is None and query.shape[2] > 1 and kwargs.get("cache") is None:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        # Without `num_key_value_groups`.
        layer = SimpleNamespace(is_causal=bool(getattr(module, "is_causal", True)))
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        layer, query, key, value, attention_mask, **kwargs
    )
    return result
