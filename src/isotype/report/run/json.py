"""A run as JSON; `schema.json` beside this file describes it."""

from __future__ import annotations

import json
import math
import types
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from isotype.report.run.record import SCHEMA_VERSION, RunRecord

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


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


def from_json(text: str) -> RunRecord:
    """The run that `to_json` wrote.

    Raises:
        ValueError: it is not JSON, or of another version of the form.
    """
    content = json.loads(text)
    version = content.pop("schema_version", None) if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version {version}, expected {SCHEMA_VERSION}")
    try:
        record: RunRecord = _decode(content, RunRecord)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no run report: {error!r}") from error
    return record


def _decode(value: Any, kind: Any) -> Any:
    """`value` of parsed JSON as the type that an annotation of a record names."""
    arguments = get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _decode(each, hints[name]) for name, each in value.items()})  # type: ignore[operator]
    if get_origin(kind) in (Union, types.UnionType):
        (some,) = (each for each in arguments if each is not types.NoneType)
        return None if value is None else _decode(value, some)
    if get_origin(kind) is tuple:
        each = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(_decode(item, of) for item, of in zip(value, each, strict=True))
    return _NUMBERS.get(value, value) if kind is float else value
