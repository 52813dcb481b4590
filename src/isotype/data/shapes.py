"""Types of JSON values, merged over all rows of a file into one schema that keeps the values of the file.

`datasets` would infer a schema from the first part of a file, turn ISO dates into timestamps, digits in CSV into integers
and "NA" into null, and add to each object all keys of the objects in other rows.
"""

from collections.abc import Iterable
from functools import reduce
from typing import Any

# A scalar type's name, ("list", shape) or ("struct", ((key, shape), …)).
Shape = str | tuple[str, Any]

NULL: Shape = "null"
PICTURE: Shape = "picture"
STRING: Shape = "string"
JSON: Shape = "json"  # objects whose keys or types differ between rows; stored as JSON text
MIXED: Shape = "mixed"  # values without a common type
HUGE: Shape = "huge"  # an integer beyond 64 bits
DEEP: Shape = "deep"  # nested deeper than `DEEPEST`: Arrow and JSON libraries cannot read it
DEEPEST = 48
OTHER: Shape = "other"  # a value that JSON does not have, such as a date; `datasets` knows its type

_SCALARS: dict[type, Shape] = {type(None): NULL, bool: "bool", int: "int64", float: "float64", str: STRING}


def shape_of(value: object, depth: int = 0) -> Shape:
    """Return the shape (type) of a JSON value. `depth` is the number of objects and lists around the value."""
    if depth > DEEPEST:
        return DEEP
    if isinstance(value, dict):
        return _struct(tuple((key, shape_of(item, depth + 1)) for key, item in value.items()))
    if isinstance(value, list):
        return _list_of(value, depth)
    if type(value) is int and not -(2**63) <= value < 2**63:
        return HUGE
    return _SCALARS.get(type(value), OTHER)


def _list_of(value: list[Any], depth: int) -> Shape:
    kinds = set(map(type, value))
    if len(kinds) == 1 and (kind := kinds.pop()) in _SCALARS:
        if kind is int and not (min(value) >= -(2**63) and max(value) < 2**63):
            return HUGE
        return _list(_SCALARS[kind])
    return _list(reduce(merge, (shape_of(item, depth + 1) for item in value), NULL))


def _list(item: Shape) -> Shape:
    return item if item in (MIXED, HUGE, DEEP, OTHER) else ("list", item)


def _unfit(shapes: Iterable[Shape]) -> Shape | None:
    """Return the shape in `shapes` that cannot be stored even as JSON text (DEEP or HUGE), or None."""
    present = {*shapes}
    return next((shape for shape in (DEEP, HUGE) if shape in present), None)


def _struct(fields: tuple[tuple[str, Shape], ...]) -> Shape:
    kinds = [shape for _, shape in fields]
    if unfit := _unfit(kinds):
        return unfit
    # `datasets` takes an object with the key "_type" for a feature; Arrow ends a name at its first NUL.
    unfit_name = any(key == "_type" or "\0" in key for key, _ in fields)
    if not fields or unfit_name or MIXED in kinds or OTHER in kinds:
        return JSON
    return ("struct", fields)


def merge(a: Shape, b: Shape) -> Shape:
    """Return the narrowest shape that fits both values: JSON if the keys of objects differ, and MIXED if no shape fits."""
    if a is b or a == b or b == NULL:
        return a
    if a == NULL:
        return b
    if unfit := _unfit((a, b)):
        return unfit
    if {a, b} == {"int64", "float64"}:
        return "float64"
    if isinstance(a, tuple) and isinstance(b, tuple) and a[0] == b[0]:
        return _list(merge(a[1], b[1])) if a[0] == "list" else _merge_structs(dict(a[1]), dict(b[1]))
    objects = [shape for shape in (a, b) if shape == JSON or shape[0] == "struct"]
    return JSON if len(objects) == 2 else MIXED


def _merge_structs(a: dict[str, Shape], b: dict[str, Shape]) -> Shape:
    if a.keys() != b.keys():
        return _unfit((*a.values(), *b.values())) or JSON
    return _struct(tuple((key, merge(shape, b[key])) for key, shape in a.items()))


def to_feature(shape: Shape) -> Any:
    """Return the feature of `datasets` for a shape: `Value`, `List`, `Json`, `Image` or a dict of features."""
    import datasets

    if shape == JSON:
        return datasets.Json()
    if shape == PICTURE:
        return datasets.Image(mode="RGB")
    if isinstance(shape, str):
        return datasets.Value(shape)
    kind, inner = shape
    if kind == "list":
        return datasets.List(to_feature(inner))
    return {key: to_feature(item) for key, item in inner}


def shape_of_feature(feature: Any) -> Shape | None:
    """Return the shape of a feature of `datasets`, or None for a feature that no shape describes, such as a tensor."""
    import datasets

    if isinstance(feature, datasets.Json):
        return JSON
    if isinstance(feature, datasets.Image):
        return PICTURE
    if isinstance(feature, datasets.Value):
        return str(feature.dtype)
    if isinstance(feature, datasets.List):
        inner = shape_of_feature(feature.feature)
        return None if inner is None else ("list", inner)
    if isinstance(feature, dict):
        fields = {key: shape_of_feature(item) for key, item in feature.items()}
        return None if None in fields.values() else ("struct", tuple(fields.items()))
    return None
