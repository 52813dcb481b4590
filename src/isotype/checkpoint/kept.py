"""Measurements of value ranges and of damages that are kept: in the user's cache folder, found again by what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from isotype.core.cache import default_cache_dir
from isotype.core.errors import Problem, SaveError
from isotype.precision.damages import Damages
from isotype.precision.ranges import Ranges

_Measurement = TypeVar("_Measurement", Ranges, Damages)


def kept_ranges(key: str) -> Ranges | None:
    """The measurement of a checkpoint that was kept, on whatever path the same checkpoint lay then.

    How old it is, its `when` says. One that is damaged or of another layout counts as none.

    Args:
        key: `fingerprint` of the checkpoint, see `isotype.checkpoint.opened.Checkpoint`.
    """
    return _kept(key, "ranges", Ranges.from_json)


def keep_ranges(ranges: Ranges) -> Path:
    """Keep a measurement of a checkpoint for `kept_ranges`; its `key` says of which.

    Raises:
        ValueError: it is of a model in memory.
        SaveError: it cannot be written.
    """
    return _keep(ranges, "ranges", "value ranges")


def kept_damages(key: str) -> Damages | None:
    """The measurement of what quantization does to a checkpoint, as `kept_ranges`."""
    return _kept(key, "damages", Damages.from_json)


def keep_damages(damages: Damages) -> Path:
    """Keep a measurement of a checkpoint for `kept_damages`; raises as `keep_ranges`."""
    return _keep(damages, "damages", "damages")


def kept_or_noted(measurement: _Measurement) -> _Measurement:
    """The measurement, which is in the cache now, or says why it is not."""
    try:
        if isinstance(measurement, Ranges):
            keep_ranges(measurement)
        else:
            keep_damages(measurement)
    except SaveError as error:
        note = f"it was not kept: {error.problems[0].given}"
        return replace(measurement, notes=(*measurement.notes, note))
    return measurement


def _kept(key: str, kind: str, parse: Callable[[str], _Measurement]) -> _Measurement | None:
    path = _path(key, kind)
    if not path.is_file():
        return None
    try:
        measurement = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return measurement if measurement.key == key else None


def _keep(measurement: Ranges | Damages, kind: str, words: str) -> Path:
    if not measurement.key:
        raise ValueError(f"a model in memory has no key to keep its {kind} under")
    path = _path(measurement.key, kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return measurement.save(path)
    except OSError as error:
        fix = "set ISOTYPE_CACHE to a folder that can be written"
        problem = Problem(f"{path}: {error}", "a folder that can be written", fix)
        raise SaveError(f"the measurement of {words} cannot be kept", [problem]) from error


def _path(key: str, kind: str) -> Path:
    return default_cache_dir() / kind / f"{key}.json"
