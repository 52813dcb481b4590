"""Stacked weights that are not stored in a quantization format, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable

from isotype.core.formats import FORMATS
from isotype.core.names import EXPERT


def why_dense(shape: Iterable[int], storage: str) -> str | None:
    """Return why a stacked weight `[experts, d1, d2]` is not quantized; None if it is."""
    _, *matrix = shape
    block, values = FORMATS[storage].block, math.prod(matrix)
    if block and values % block:
        return f"{values:,} values of an expert are no whole blocks of {block}"
    return None


def why_kept(weights: Iterable[tuple[str, Iterable[int]]], storage: str) -> str:
    """Return why 3-D weights of a quantized model are in a float dtype; `storage` may name several formats."""
    form = storage if storage in FORMATS else "int8"
    reasons = {why_dense(shape, form) if EXPERT.search(name) else _OTHER for name, shape in weights}
    (reason,) = reasons if len(reasons) == 1 else (None,)
    if reason == _OTHER:
        return f"{storage} {_OTHER}"
    return reason or "they were left out where the model was quantized (isotype.load quantizes experts)"


_OTHER = "reaches linear layers and experts only"
