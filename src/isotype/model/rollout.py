"""Runs the forwards of generation in grpo and rloo: a forward of the prompts, and a forward of one token in each row."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from isotype.compat.peft import without_peft
from isotype.records.request import LossOf

CACHES = ("cache", "past_key_values")
"""Names of the argument (and output) for the cache of keys and values: `cache` from transformers 5.24 on."""


def rollout(prompts: Mapping[str, torch.Tensor], completion: int) -> LossOf:
    """Return a call of the part of `generate` that needs the most memory: `completion` tokens for all rows of a step."""
    return LossOf(partial(_generate, completion=completion), prompts, generates=True)


def _generate(model: Any, batch: Mapping[str, torch.Tensor], completion: int) -> torch.Tensor:
    # PEFT's own forward does not name this argument, but passes it on to the model's.
    takes = inspect.signature(without_peft(model).forward).parameters
    last: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    output = model(**batch, use_cache=True, **last)
    name = next((name for name in CACHES if getattr(output, name, None) is not None), "")
    cache: Any = getattr(output, name, None) if name else None
    # A folded layer counts the caches of the layers that it represents at the end of its forward. So one forward fills
    # all caches, and then another forward computes the activations. The completion also takes two forwards.
    output = model(**batch, use_cache=False, **last)
    if hasattr(cache, "layers"):
        ids, mask = batch["input_ids"][:, -1:], batch["attention_mask"][:, :1]
        for tokens in filter(None, (completion - 1, 1)):
            length = cache.get_seq_length() + tokens
            text = {"input_ids": ids, "attention_mask": mask.repeat(1, length)}
            # As `generate` does. Else Qwen-VL derives positions for the whole mask.
            if "position_ids" in takes:
                text["position_ids"] = torch.full_like(ids[:1], length - 1)
            with _standing_for(tokens, cache):
                output = model(**text, **{name: cache}, use_cache=True, **last)
    return torch.softmax(output.logits[:, -1].float(), dim=-1)


@contextmanager
def _standing_for(tokens: int, cache: Any) -> Iterator[None]:
    """In the `with` block, the keys and values of one token take the memory of `tokens` tokens.

    In a layer with a sliding window, they take at most the memory of the tokens that still fit into the window.
    """
    update, mask_sizes = cache.update, cache.get_mask_sizes

    def count(index: int) -> int:
        window = getattr(cache.layers[index], "sliding_window", None)
        room = tokens if window is None else window - 1 - cache.get_seq_length(index)
        return max(1, min(tokens, room))

    def grown(keys: torch.Tensor, values: torch.Tensor, index: int, *args: Any, **kwargs: Any) -> Any:
        times = count(index)
        return update(keys.repeat(1, 1, times, 1), values.repeat(1, 1, times, 1), index, *args, **kwargs)

    def sizes(query: int, index: int) -> Any:
        return mask_sizes(query + count(index) - 1, index)

    cache.update, cache.get_mask_sizes = grown, sizes
    try:
        yield
    finally:
        cache.update, cache.get_mask_sizes = update, mask_sizes
