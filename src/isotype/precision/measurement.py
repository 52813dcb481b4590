"""Saving and loading of measurements of a model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from isotype.core.errors import CheckpointError
from isotype.core.files import write_whole
from isotype.core.json_records import decoded


@dataclass(frozen=True)
class Measurement:
    """A measurement stored as JSON.

    Attributes:
        subject: the measured quantity, in a word.
        layout: key and version of the file layout; files of another version are measured again.
    """

    subject: ClassVar[str]
    layout: ClassVar[tuple[str, int]]

    def to_json(self) -> str:
        """Return JSON text; `from_json` is the inverse."""
        return json.dumps(dict([self.layout]) | asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the measurement that `to_json` wrote; raises ValueError for other text or another layout."""
        key, number = cls.layout
        try:
            values: dict[str, Any] = json.loads(text)
            if values.pop(key) != number:
                raise ValueError(f"not a measurement of layout {number}")
            measurement: Self = decoded(values, cls)
            measurement.require_whole()
            return measurement
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a measurement: {error}") from error

    def require_whole(self) -> None:
        """Raise ValueError if the loaded measurement is incomplete."""

    def save(self, path: str | Path) -> Path:
        """Write the measurement to the file `path` (temporary name, then rename)."""
        write_whole(Path(path), self.to_json() + "\n")
        return Path(path)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Return the measurement in the file `path`; raises CheckpointError for another file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            headline, written = f"unreadable measurement of {cls.subject}", f"what {cls.__name__}.save wrote"
            raise CheckpointError.of(headline, f"{path}: {error}", written, "measure again") from error
