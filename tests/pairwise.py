"""Pairwise coverings: every pair of values of any two axes once, instead of every combination of all of them.

Faults of a policy come from one value or from two that meet (int8 with DoRA, float16 with pinned norms). Where axes do
not interact by threes, the covering finds what the product finds. The rest of the product is marked `exhaustive`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

Row = tuple[int, ...]
Pair = tuple[int, int, int, int]


def pairs_of(row: Row) -> set[Pair]:
    """`(axis, value, axis, value)` of all pairs in a row of indices."""
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}


def covering(sizes: Sequence[int]) -> list[Row]:
    """Rows of indices that hold every pair of values of two axes: greedy, the first of the best, so always the same."""
    rows = list(product(*map(range, sizes)))
    missing = set().union(*map(pairs_of, rows))
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return sorted(chosen)


def pairwise(
    names: str, *axes: Iterable[Any], ids: Callable[[Any], str] | None = None
) -> pytest.MarkDecorator:
    """`parametrize` over the product of `axes`; what the pairwise covering leaves out is marked `exhaustive`.

    Args:
        names: the arguments, one for each axis: `"model, dtype, storage"`.
        axes: the values of each; a tuple stays one value.
        ids: a value's part of the test's id.
    """
    values = [list(axis) for axis in axes]
    chosen = set(covering([len(axis) for axis in values]))
    written = ids or _written
    return pytest.mark.parametrize(
        [name.strip() for name in names.split(",")],
        [
            pytest.param(
                *(axis[index] for axis, index in zip(values, row, strict=True)),
                id="-".join(written(axis[index]) for axis, index in zip(values, row, strict=True)),
                marks=() if row in chosen else pytest.mark.exhaustive,
            )
            for row in product(*(range(len(axis)) for axis in values))
        ],
    )


def _written(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "-".join(map(_written, value))
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)
