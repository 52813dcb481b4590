"""A run as JSON; `schema.json` beside this file describes it."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import Any

from isotype.report.run.record import SCHEMA_VERSION, RunRecord


def to_json(record: RunRecord) -> str:
    """A run as strict JSON (RFC 8259).

    The object holds `schema_version` and the fields of `RunRecord`, nested records as objects. JSON has no NaN
    and no infinities: in a field that holds a float they are the strings `"NaN"`, `"Infinity"`, `"-Infinity"`.
    """
    content = {"schema_version": SCHEMA_VERSION, **_encode(record)}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
