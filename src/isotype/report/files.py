"""A report as a file."""

from __future__ import annotations

from pathlib import Path

from isotype.core.errors import SaveError
from isotype.core.files import write_whole


def write_report(path: Path, text: str) -> Path:
    """Write a report whole, in a folder that is made if need be.

    Raises:
        SaveError: the file cannot be written; a former one is untouched.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, text)
    except OSError as error:
        what = f"{path}: {error.strerror or error}"
        expected = "a path that can be written to, with room for the report"
        raise SaveError.of(
            "the report could not be written",
            what,
            expected,
            "free the path or give another one",
        ) from error
