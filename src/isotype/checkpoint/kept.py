"""Measurements of value ranges and of damages that are kept: in the user's cache folder, found again by what the checkpoint holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from isotype.core.cache import default_cache_dir
from isotype.core.errors import SaveError
from isotype.precision.damages import Damages
from isotype.precision.ranges import Ranges

Measurement = TypeVar("Measurement", Ranges, Damages)


def kept(kind: type[Measurement], key: str) -> Measurement | None:
    """The measurement of a checkpoint that was kept, on whatever path the same checkpoint lay then.

    How old it is, its `when` says. One that is damaged or of another layout counts as none.

    Args:
        kind: `Ranges` or `Damages`.
        key: `fingerprint` of the checkpoint, see `isotype.checkpoint.opened.Checkpoint`.
    """
    path = _path(kind, key)
    if not path.is_file():
        return None
    try:
        measurement = kind.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return measurement if measurement.key == key else None


def keep(measurement: Ranges | Damages) -> Path:
    """Keep a measurement of a checkpoint for `kept`; its `key` says of which.

    Raises:
        ValueError: it is of a model in memory.
        SaveError: it cannot be written.
    """
    if not measurement.key:
        raise ValueError(f"a model in memory has no key to keep its {measurement.subject} under")
    path = _path(type(measurement), measurement.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return measurement.save(path)
    except OSError as error:
        headline, what = f"the measurement of {measurement.subject} cannot be kept", f"{path}: {error}"
        expected = "a folder that can be written"
        raise SaveError.of(headline, what, expected, f"set ISOTYPE_CACHE to {expected}") from error


def kept_or_noted(measurement: Measurement) -> Measurement:
    """The measurement, which is in the cache now, or says why it is not."""
    try:
        keep(measurement)
    except SaveError as error:
        note = f"it was not kept: {error.problems[0].given}"
        return replace(measurement, notes=(*measurement.notes, note))
    return measurement


def _path(kind: type[Ranges | Damages], key: str) -> Path:
    return default_cache_dir() / kind.subject / f"{key}.json"
