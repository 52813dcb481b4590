"""Conversion of frozen records to JSON and back. `python -m tools.schemas` writes their JSON Schemas."""

import json
import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import PurePath
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from isotype.core import VERSION

Share = Annotated[float, ("minimum", 0), ("maximum", 1)]
"""A fraction from 0 to 1. `Annotated` adds minimum and maximum to the JSON Schema."""
Signed = Annotated[int, ("type", "integer")]
"""An integer that may be negative. A plain `int` has minimum 0 in the JSON Schema."""

Names = Mapping[type, str]
"""Maps a record type to the keys of its JSON object, separated by spaces: `key`, `key=attribute` or `object.key=attribute`."""

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
NONFINITE = tuple(_NUMBERS)
"""Strings that represent the floats that JSON lacks."""

Record = TypeVar("Record")
_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


class FormatVersionError(ValueError):
    """A file has a format version that this isotype does not read."""


def require_version(written: object, version: int) -> None:
    """Raise FormatVersionError if a file has another format version than `version`."""
    if written != version:
        raise FormatVersionError(f"format version {written}; isotype {VERSION} reads version {version}")


def keys_of(kind: Any, names: Mapping[Any, str]) -> dict[str, str]:
    """Return JSON key -> attribute of a record type, in the order of the JSON object."""
    if kind not in names:
        return {field.name: field.name for field in fields(kind)}
    pairs = (name.partition("=") for name in names[kind].split())
    return {key: attribute or key for key, _, attribute in pairs}


def text_of(record: Any, version: int, names: Names | None = None) -> str:
    """Return a record as strict JSON (RFC 8259): an object with `schema_version` and the record's keys."""
    content = {"schema_version": version, **encoded(record, names or {})}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def encoded(value: Any, names: Names) -> Any:
    """Convert a value to JSON: records and mappings to objects, tuples to arrays, dtypes and paths to strings."""
    if is_dataclass(value):
        content: dict[str, Any] = {}
        for key, attribute in keys_of(type(value), names).items():
            *outer, inner = key.split(".")
            place = content
            for name in outer:
                place = place.setdefault(name, {})
            place[inner] = encoded(attrgetter(attribute)(value), names)
        return content
    if isinstance(value, Mapping):
        return {encoded(key, names): encoded(item, names) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encoded(item, names) for item in value]
    if type(value).__module__ == "torch":  # a dtype, whose class cannot be named here without importing torch
        return str(value).removeprefix("torch.")
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return next(word for word, number in _NUMBERS.items() if str(number) == str(value))
    return value


def record_of(text: str, kind: type[Record], version: int) -> Record:
    """Return the record of type `kind` from a JSON text that `text_of` returned.

    Raises:
        FormatVersionError: the text has another format version.
        ValueError: the text is not JSON or not a record of this type.
    """
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    written = content.pop("schema_version", None) if isinstance(content, dict) else None
    require_version(written, version)
    try:
        record: Record = decoded(content, kind)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no {kind.__name__}: {error!r}") from error
    return record


def decoded(value: Any, kind: Any) -> Any:
    """Return parsed JSON as the annotated type `kind`. Another type raises KeyError, TypeError or AttributeError."""
    arguments = get_args(kind)
    if is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: decoded(item, hints[name]) for name, item in value.items()})  # type: ignore[operator]
    if get_origin(kind) in (Union, types.UnionType):
        (wrapped,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else decoded(value, wrapped)
    if get_origin(kind) is tuple:
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(decoded(item, item_kind) for item, item_kind in zip(value, kinds, strict=True))
    if getattr(kind, "__module__", "") == "torch":  # a dtype, as in `encoded`
        return getattr(sys.modules["torch"], value)
    return _NUMBERS.get(value, value) if kind is float else value
