"""Writes the JSON Schemas of reports from their records: types from annotations, descriptions from docstrings.

python -m tools.schemas
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from isotype.core.json_records import NONFINITE, Names, keys_of
from isotype.planning import from_request as plan
from isotype.report.check import json as check
from isotype.report.run import record as run
from tools.sources import PACKAGE, ROOT

Schema = dict[str, Any]

_DTYPE = {"description": "Name of a dtype without `torch.`: `bfloat16`.", "type": "string", "minLength": 1}
_NUMBER = {
    "description": "A number; JSON has no NaN and no infinities, which are strings.",
    "anyOf": [{"type": "number"}, {"enum": list(NONFINITE)}],
}
_VERSION = {
    "description": "Version of this form; it grows when a reader of the former version would misread the new one."
}


@dataclass(frozen=True)
class Form:
    """The JSON of one kind of report.

    Attributes:
        name: of the report, as in its URN.
        record: what is written.
        version: of the form.
        names: keys of records, see `isotype.core.json_records.Names`.
    """

    name: str
    record: type
    version: int
    names: Names


FORMS = {
    "report/check/schema.json": Form("check report", check.Check, check.SCHEMA_VERSION, check.NAMES),
    "report/run/schema.json": Form("run report", run.RunRecord, run.SCHEMA_VERSION, {}),
    "planning/schema.json": Form("plan", plan.Plan, plan.SCHEMA_VERSION, plan.NAMES),
}


def schema(form: Form) -> Schema:
    """The schema of a form."""
    writer = _Writer(form.names)
    root = writer.object_of(form.record)
    root["properties"] = {"schema_version": {**_VERSION, "const": form.version}, **root["properties"]}
    root["required"].insert(0, "schema_version")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{PACKAGE}:schema:{form.name.replace(' ', '-')}:{form.version}",
        "title": f"{PACKAGE} {form.name}",
        **root,
        "$defs": {name: writer.parts[name] for name in sorted(writer.parts)},
    }


class _Writer:
    """What is written of records: `parts` are the definitions that others refer to."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.parts: dict[str, Schema] = {}

    def object_of(self, record: Any) -> Schema:
        content: Schema = _object(_paragraph(record))
        for key, path in keys_of(record, self.names).items():
            *outer, inner = key.split(".")
            place = content
            for each in outer:
                place = place["properties"].setdefault(each, _object())
            place["properties"][inner] = self._attribute(record, path)
        _close(content)
        return content

    def _attribute(self, record: Any, path: str) -> Schema:
        *outer, name = path.split(".")
        for each in outer:
            record, _ = _member(record, each)
        kind, about = _member(record, name)
        return _described(self.type_of(kind), about)

    def type_of(self, kind: Any, limits: Mapping[str, Any] | None = None) -> Schema:
        """The schema of an annotation."""
        arguments = get_args(kind)
        origin = get_origin(kind)
        if origin is Annotated:
            return self.type_of(arguments[0], dict(arguments[1:]))
        if origin in (Union, types.UnionType):
            (some,) = (each for each in arguments if each is not types.NoneType)
            return _nullable(self.type_of(some, limits))
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin is tuple and arguments[1:] == (...,):
            return {"type": "array", "items": self.type_of(arguments[0])}
        if origin is tuple:
            items = [self.type_of(each) for each in arguments]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            keys, values = arguments
            content = {"type": "object", "additionalProperties": self.type_of(values)}
            return content if keys is str else {"propertyNames": self.type_of(keys), **content}
        if is_dataclass(kind):
            name = kind.__name__  # type: ignore[union-attr]
            if name not in self.parts:
                self.parts[name] = {}
                self.parts[name] = self.object_of(kind)
            return {"$ref": f"#/$defs/{name}"}
        if kind in (torch.dtype, float):
            name, part = ("dtype", _DTYPE) if kind is torch.dtype else ("number", _NUMBER)
            self.parts[name] = part
            return {"$ref": f"#/$defs/{name}", **(limits or {})}
        plain = {str: "string", int: "integer", bool: "boolean"}[kind]
        return {"type": plain, **(limits or ({"minimum": 0} if kind is int else {}))}


def _member(record: Any, name: str) -> tuple[Any, str]:
    """The annotation and the description of a field or a property."""
    member = inspect.getattr_static(record, name, None)
    if isinstance(member, property):
        return get_type_hints(member.fget, include_extras=True)["return"], _paragraph(member)
    return get_type_hints(record, include_extras=True)[name], _attributes(record).get(name, "")


def _object(about: str = "") -> Schema:
    return _described({"type": "object", "properties": {}}, about)


def _close(content: Schema) -> None:
    """Every key is there, and no other; so in the objects inside that dotted keys make."""
    for each in content["properties"].values():
        if each.get("type") == "object" and "properties" in each:
            _close(each)
    content["required"] = list(content["properties"])
    content["additionalProperties"] = False


def _described(content: Schema, about: str) -> Schema:
    return {"description": about, **content} if about else content


def _nullable(content: Schema) -> Schema:
    if "type" in content:
        return {**content, "type": [content["type"], "null"]}
    if "enum" in content:
        return {"enum": [*content["enum"], None]}
    return {"anyOf": [content, {"type": "null"}]}


def _paragraph(of: Any) -> str:
    return _line((inspect.getdoc(of) or "").partition("\n\n")[0])


def _line(text: str) -> str:
    text = " ".join(text.split()).replace("None", "null")
    return text[:1].upper() + text[1:]


def _attributes(record: Any) -> dict[str, str]:
    """What the docstrings of a record and those above it say of each attribute."""
    about: dict[str, str] = {}
    for kind in reversed(inspect.getmro(record)):
        section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for entry in re.split(r"\n(?=    \S)", section):
            names, _, text = entry.partition(": ")
            about |= {name.strip(): _line(text) for name in names.split(",")}
    return about


def texts() -> dict[Path, str]:
    """File -> content of every schema."""
    folder = ROOT / "src" / PACKAGE
    return {
        folder / name: json.dumps(schema(form), indent=1, ensure_ascii=False) + "\n"
        for name, form in FORMS.items()
    }


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8", newline="\n")
