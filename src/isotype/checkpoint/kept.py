"""Cache of measured value ranges and damages in the user's cache folder, by the content of the checkpoint."""

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
    """Return the cached measurement of a checkpoint, wherever the checkpoint is; None if damaged or of another
    layout.

    `kind` is `Ranges` or `Damages`, `key` the fingerprint of `isotype.checkpoint.opened.Checkpoint`.
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
    """Cache a measurement of a checkpoint by its `key`.

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
    """Cache a measurement and return it, with a note if that failed."""
    try:
        keep(measurement)
    except SaveError as error:
        note = f"it was not kept: {error.problems[0].given}"
        return replace(measurement, notes=(*measurement.notes, note))
    return measurement


def _path(kind: type[Ranges | Damages], key: str) -> Path:
    return default_cache_dir() / kind.subject / f"{key}.json"
