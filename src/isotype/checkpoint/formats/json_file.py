"""JSON in and beside checkpoints: damaged text and names that occur twice are errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from isotype.core.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: it is not one, or cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError.of(
            f"{path.name} is not JSON",
            f"{path}: {error}",
            "JSON",
            "correct the file, or copy or download it again",
        ) from error
    if not isinstance(content, dict):
        what = f"{path}: a JSON {type(content).__name__}"
        raise CheckpointError.of(
            f"{path.name} is not an object", what, "a JSON object", "copy or download the file again"
        )
    return content


def parse_unique(text: bytes) -> tuple[Any, list[str]]:
    """What JSON says, and the names that an object of it has more than once, of which `json` keeps the last.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            twice.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return entries

    return json.loads(text, object_pairs_hook=unique), twice
