"""A and s B of adapters in the dtype of the products, for all layers with one input at once.

On GPUs two kernels round the adapters of a whole group, instead of one or two per tensor whose launches cost
more than their work. This is done in every forward. Caching would need version counters of the masters, but
some optimizers write through `.data`, and FSDP2 keeps the counters of gathered parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isotype.compat.torch import copy_each, multiply_each


@dataclass(frozen=True)
class Pairs:
    """The adapters of one layer: A `[rank, in]`, B `[out, rank]` and scale of each."""

    downs: Sequence[torch.Tensor]
    ups: Sequence[torch.Tensor]
    scales: Sequence[float]


Rounded = tuple[torch.Tensor | None, list[torch.Tensor | None]]
"""(all A stacked `[rank, in]`, per layer s B of its adapters side by side `[out, rank]`); None for missing ones."""


def rounded(layers: Sequence[Pairs], dtype: torch.dtype, *, stacked: bool) -> Rounded:
    """Return the adapters of layers with the same input in `dtype`; s B is multiplied in B's dtype and
    rounded once.

    `stacked`: whether A is requested too.
    """
    held = [x for layer in layers for x in (*layer.downs, *layer.ups)]
    if not held or held[0].device.type == "cpu" or all(x.dtype == dtype for x in held):
        return _one_by_one(layers, dtype, stacked)
    return _together(layers, dtype, stacked)


def _one_by_one(layers: Sequence[Pairs], dtype: torch.dtype, stacked: bool) -> Rounded:
    downs = [down for layer in layers for down in layer.downs] if stacked else []
    down = (downs[0] if len(downs) == 1 else torch.cat(downs)).to(dtype) if downs else None
    scaled = []
    for layer in layers:
        parts = [up * scale for up, scale in zip(layer.ups, layer.scales, strict=True)]
        scaled.append((parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(dtype) if parts else None)
    return down, scaled


def _together(layers: Sequence[Pairs], dtype: torch.dtype, stacked: bool) -> Rounded:
    ups = [up for layer in layers for up in layer.ups]
    sources = multiply_each(ups, [scale for layer in layers for scale in layer.scales])
    targets: list[torch.Tensor] = []
    scaled: list[torch.Tensor | None] = []
    for layer in layers:
        ranks = [up.shape[1] for up in layer.ups]
        whole = layer.ups[0].new_empty(layer.ups[0].shape[0], sum(ranks), dtype=dtype) if ranks else None
        scaled.append(whole)
        if whole is not None:
            targets += _parts(whole, ranks, 1)
    down = None
    if stacked:
        downs = [down for layer in layers for down in layer.downs]
        ranks = [each.shape[0] for each in downs]
        down = downs[0].new_empty(sum(ranks), downs[0].shape[1], dtype=dtype)
        sources, targets = [*sources, *downs], [*targets, *_parts(down, ranks, 0)]
    copy_each(targets, sources)
    return down, scaled


def _parts(whole: torch.Tensor, ranks: list[int], dim: int) -> Sequence[torch.Tensor]:
    return (whole,) if len(ranks) == 1 else whole.split_with_sizes(ranks, dim)
