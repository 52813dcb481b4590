"""Which stacked weights are stored in a quantization format, and what is said of the others."""

from __future__ import annotations

import math
from collections.abc import Iterable

from isotype.core.formats import FORMATS
from isotype.core.names import EXPERT


def why_dense(shape: Iterable[int], storage: str) -> str | None:
    """Why a stacked weight `[experts, d1, d2]` is not stored in a quantization format; None where it is."""
    _, *matrix = shape
    block, values = FORMATS[storage].block, math.prod(matrix)
    if block and values % block:
        return f"{values:,} values of an expert are no whole blocks of {block}"
    return None


def why_kept(weights: Iterable[tuple[str, Iterable[int]]], storage: str) -> str:
    """In words, why 3-D weights of a quantized model are in a float dtype.

    Args:
        weights: (name, shape) of each.
        storage: the format of the others; several joined by "and".
    """
    form = storage if storage in FORMATS else "int8"
    reasons = {why_dense(shape, form) if EXPERT.search(name) else _OTHER for name, shape in weights}
    (reason,) = reasons if len(reasons) == 1 else (None,)
    if reason == _OTHER:
        return f"{storage} {_OTHER}"
    return reason or "they were left out where the model was quantized (isotype.load quantizes experts)"


_OTHER = "reaches linear layers and experts only"
