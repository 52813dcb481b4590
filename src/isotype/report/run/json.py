"""A run as JSON, and back."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from isotype.core.errors import IsotypeError, Problem
from isotype.report.run.record import JSON_NAME, SCHEMA_VERSION, RunRecord

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


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
        IsotypeError: the text is not strict JSON, has another schema version, or a field is missing, unknown or of
            the wrong type; every such field is named.
    """
    try:
        content = json.loads(text, parse_constant=_reject_constant)
    except ValueError as error:
        problem = Problem(str(error), "strict JSON", f"give the {JSON_NAME} that a run wrote")
        raise IsotypeError("this is not a run report", [problem]) from error
    version = content.pop("schema_version", None) if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        problem = Problem(
            f"schema_version {version!r}",
            f"schema_version {SCHEMA_VERSION}",
            f"give the {JSON_NAME} that a run wrote, and read it with the isotype that wrote it or a later one",
        )
        raise IsotypeError("this is not a run report that this version of isotype reads", [problem])
    problems: list[Problem] = []
    record = _decode(RunRecord, content, "", problems)
    if problems:
        raise IsotypeError("this run report is damaged", problems)
    assert isinstance(record, RunRecord)
    return record


def _reject_constant(name: str) -> float:
    raise ValueError(f"the literal {name}")


@cache
def _hints(record_type: type) -> dict[str, Any]:
    return get_type_hints(record_type)


def _decode(kind: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    """`value` as the annotated type `kind`; what does not fit is added to `problems`, with its place."""
    arguments = get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        return _decode_record(kind, value, where, problems)
    if get_origin(kind) is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(value):
            places = [f"{where}[{index}]" for index in range(len(value))]
            return tuple(_decode(*item, problems) for item in zip(kinds, value, places, strict=True))
    elif NoneType in arguments:
        return None if value is None else _decode(arguments[0], value, where, problems)
    elif get_origin(kind) is Literal:
        if value in arguments:
            return value
    elif kind is float and isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    elif kind is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    elif type(value) is kind:
        return value
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    problems.append(
        Problem(
            f"{where or 'the report'} = {shown}",
            _expected(kind),
            "restore the file from the run that wrote it",
        )
    )
    return None


def _decode_record(kind: Any, value: dict[str, Any], where: str, problems: list[Problem]) -> Any:
    hints, before = _hints(kind), len(problems)
    prefix = f"{where}." if where else ""
    for name in [name for name in hints if name not in value]:
        problems.append(
            Problem(
                f"{prefix}{name} is missing",
                _expected(hints[name]),
                "restore the file from the run that wrote it",
            )
        )
    for name in [name for name in value if name not in hints]:
        problems.append(
            Problem(f"{prefix}{name}", "no such field", "remove it, or read the file with a later isotype")
        )
    decoded = {
        name: _decode(hint, value[name], f"{prefix}{name}", problems)
        for name, hint in hints.items()
        if name in value
    }
    return kind(**decoded) if len(problems) == before else None


def _expected(kind: Any) -> str:
    names = {
        int: "a whole number",
        float: 'a number, "NaN", "Infinity" or "-Infinity"',
        str: "a text",
        bool: "true or false",
    }
    if kind in names:
        return names[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if NoneType in arguments:
        return f"{_expected(arguments[0])} or null"
    if is_dataclass(kind):
        return "an object"
    return "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}"
