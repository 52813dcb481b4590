"""A fingerprint of a data set's rows. A resumed training detects changed data by the fingerprint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from isotype.data.cells import Row
from isotype.data.pictures import PICTURE_COLUMNS, pictures_in

_READ_BYTES = 1 << 27
"""Maximum number of bytes to read for a fingerprint. Only every n-th row of a larger data set is read."""


def fingerprint_of_rows(rows: Any) -> str | None:
    """Return the number of rows and a hash of their content (the same on all machines), or None for a stream."""
    if not hasattr(rows, "__len__"):
        return None
    count = len(rows)
    digest = hashlib.blake2b(str(count).encode(), digest_size=8)
    step = max(1, -(-rows.data.nbytes // _READ_BYTES))
    chosen = rows if step == 1 else rows.select(range(0, count, step))
    # In Arrow's format an image is not decoded.
    for table in chosen.with_format("arrow").iter(batch_size=1000):
        rows_of_table = table.to_pylist()
        if {*PICTURE_COLUMNS} & {*table.column_names}:
            rows_of_table = [_movable(row) for row in rows_of_table]
        digest.update(json.dumps(rows_of_table, sort_keys=True, default=repr).encode())
    return f"{count:,} rows, {digest.hexdigest()}"


def _movable(row: Row) -> Row:
    """Return the row with images as file names and sizes, because their paths differ between machines."""
    places: list[object] = []
    for picture in pictures_in(row):
        path = None if picture.get("bytes") is not None else Path(picture["path"])
        size = path.stat().st_size if path is not None and path.is_file() else None
        places.append(picture if path is None else [path.name, size])
    return {name: value for name, value in row.items() if name not in PICTURE_COLUMNS} | {"images": places}
