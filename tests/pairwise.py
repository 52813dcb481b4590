"""Coverings: every pair of values of any two axes once, or every value once, instead of every combination of all of them.

Faults of a policy come from one value or from two that meet (int8 with DoRA, float16 with pinned norms). Where axes do
not interact by threes, the pairwise covering finds what the product finds; where another test lets two axes meet, every value
once is enough. The rest of the product is marked `exhaustive`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

Row = tuple[int, ...]
Part = tuple[tuple[int, int], ...]
"""`(axis, value)` of some axes of a row."""

rest_is_made = True
"""Whether tests are made that are marked `exhaustive`: half of all, which a run that leaves them out would make in each worker."""


def parts_of(row: Row, strength: int = 2) -> set[Part]:
    """The `(axis, value)` of any `strength` axes in a row of indices."""
    return set(combinations(enumerate(row), min(strength, len(row))))


def covering(sizes: Sequence[int], strength: int = 2) -> list[Row]:
    """Rows of indices that hold every combination of values of `strength` axes: greedy, the first of the best, so always the same.

    Of strength 1 all axes go round at once, so that each value meets several of another axis.
    """
    if strength == 1:
        return [tuple(row % size for size in sizes) for row in range(max(sizes))]
    rows = list(product(*map(range, sizes)))
    missing = set().union(*(parts_of(row, strength) for row in rows))
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(parts_of(row, strength) & missing))
        missing -= parts_of(best, strength)
        chosen.append(best)
    return sorted(chosen)


def pairwise(
    names: str | Sequence[str],
    *axes: Iterable[Any],
    ids: Callable[[Any], str] | None = None,
    strength: int = 2,
    indirect: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """`parametrize` over the product of `axes`; what the covering leaves out is marked `exhaustive`, or not made.

    Args:
        names: the arguments, one for each axis: `"model, dtype, storage"`; a list where an axis gives several: `["dtype, storage", "side"]`.
        axes: the values of each; a tuple stays one value where its axis has one name. A `pytest.param` keeps its marks and its id;
            one that is `exhaustive` takes no part in the covering.
        ids: a value's part of the test's id.
        strength: of how many axes any values meet; 1: every value once.
        indirect: the names that are fixtures.
    """
    groups = [_split(each) for each in (_split(names) if isinstance(names, str) else names)]
    values = [
        [_parameter(value, len(group)) for value in axis] for group, axis in zip(groups, axes, strict=True)
    ]
    taking_part = [[at for at, value in enumerate(axis) if not _is_exhaustive(value)] for axis in values]
    chosen = {
        tuple(at[index] for at, index in zip(taking_part, row, strict=True))
        for row in covering([len(axis) for axis in taking_part], strength)
    }
    parameters = []
    for row in product(*(range(len(axis)) for axis in values)) if rest_is_made else sorted(chosen):
        picked = [axis[index] for axis, index in zip(values, row, strict=True)]
        marks = [mark for value in picked for mark in value.marks if not _is_exhaustive(value)]
        parameters.append(
            pytest.param(
                *(part for value in picked for part in value.values),
                id="-".join(
                    "-".join(map(ids or _written, value.values)) if value.id is None else value.id
                    for value in picked
                ),
                marks=marks if row in chosen else [*marks, pytest.mark.exhaustive],
            )
        )
    arguments = [name for group in groups for name in group]
    return pytest.mark.parametrize(arguments, parameters, indirect=list(indirect))


def few(names: str, values: Iterable[Any], *chosen: Any) -> pytest.MarkDecorator:
    """`parametrize` over `values`, of which all but the `chosen` are marked `exhaustive`, or not made.

    Args:
        names: the arguments: `"name"` or `"name, dtype"`.
        values: of each test; a dict: by their ids.
        chosen: values, or ids of a dict's, that are there.
    """
    arguments = _split(names)
    by_id = values if isinstance(values, Mapping) else {_written(value): value for value in values}
    wanted = {_written(each) for each in chosen}
    assert wanted
    assert wanted <= by_id.keys(), sorted(wanted - by_id.keys())
    parameters = [
        pytest.param(
            *_parameter(value, len(arguments)).values,
            id=key,
            marks=() if key in wanted else pytest.mark.exhaustive,
        )
        for key, value in by_id.items()
        if rest_is_made or key in wanted
    ]
    return pytest.mark.parametrize(arguments, parameters)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def _parameter(value: Any, arguments: int) -> Any:
    """A value as `pytest.param` has it; of several arguments, one value each."""
    if hasattr(value, "marks") and hasattr(value, "values"):
        return value
    return pytest.param(*value) if arguments > 1 else pytest.param(value)


def _is_exhaustive(value: Any) -> bool:
    return any(mark.name == "exhaustive" for mark in value.marks)


def _written(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "-".join(map(_written, value))
    if isinstance(value, set | frozenset):  # their order differs between processes
        return "-".join(sorted(map(_written, value)))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.__name__ if callable(value) else str(value)
