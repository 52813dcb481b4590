"""Which row a goal picks."""

from __future__ import annotations

from collections.abc import Sequence

from isotype.core.dtypes import parse_dtype
from isotype.core.formats import MIXED
from isotype.planning.record import Row

_SLOWER = 1.25
"""How many times slower than the fastest a row may be that `balanced` takes for its precision."""

_CODES = ("int8", MIXED, "nf4", "fp4")
"""Quantization formats, the more precise first."""


def picked(rows: Sequence[Row], goal: str) -> Row | None:
    """The row of one device that a goal picks, see `GOALS`; None where none fits."""
    fitting = [row for row in rows if row.fits and not _gathers_more(row, rows)]
    if not fitting:
        return None
    if goal == "longest":
        return max(fitting, key=lambda row: (row.longest or row.length, -_loss(row), row.speed))
    damage = _damage if all(row.damage is not None or row.storage not in _CODES for row in fitting) else _loss
    if goal == "best":
        return min(fitting, key=lambda row: (damage(row), -row.speed, row.sharding, row.peak))
    if goal == "fastest":
        return min(fitting, key=lambda row: (-row.speed, _loss(row), row.sharding, row.peak))
    fast = max(row.speed for row in fitting)
    near = [row for row in fitting if row.speed * _SLOWER >= fast]
    return min(near, key=lambda row: (damage(row), -row.speed, row.sharding, row.peak))


def front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows that fit and than which no other takes less memory and is as fast."""
    fitting = sorted((row for row in rows if row.fits), key=lambda row: (row.peak, -row.speed))
    kept: list[Row] = []
    for row in fitting:
        if not kept or row.speed > kept[-1].speed:
            kept.append(row)
    return tuple(kept)


def _gathers_more(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a sharded row gathers its weights more often than another of its storage.

    Every micro-batch gathers all of them twice; how long that takes no data sheet of a card says.
    """
    alike = [
        each for each in rows if each.fits and (each.sharding, each.storage) == (row.sharding, row.storage)
    ]
    return row.sharding == "FSDP2" and row.accumulation > min(each.accumulation for each in alike)


def _damage(row: Row) -> float:
    """As it was measured, where that is of every quantized row: a number of bits and a measure cannot be compared."""
    return row.damage or 0.0


def _loss(row: Row) -> float:
    """How much a storage rounds: a rank, no measure."""
    if row.storage in _CODES:
        return 8 + _CODES.index(row.storage)
    return 8 - parse_dtype(row.storage).itemsize
