"""Autocast's operator lists per device kind, measured by tools/autocast_lists.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache

from isotype.contracts.contract import TABLES

TABLE = TABLES / "autocast.json"


@dataclass(frozen=True)
class AutocastLists:
    """The operators that autocast treats specially, without namespace and overload (`softmax`, `mm`,
    `linear`).

    Attributes:
        lower: float operands are cast to the autocast dtype.
        float32: float operands are cast to float32.
        promote: operands are cast to the widest float dtype among them.
        float32_opt: run and return in float32 if no dtype is given.
        banned: raise under autocast.
    """

    lower: frozenset[str]
    float32: frozenset[str]
    promote: frozenset[str]
    float32_opt: frozenset[str]
    banned: frozenset[str]


@cache
def autocast_lists(kind: str) -> AutocastLists:
    """Return the lists of a device kind (ROCm uses CUDA's); raises ValueError for an unknown kind."""
    known = json.loads(TABLE.read_text(encoding="utf-8"))["lists"]
    name = {"rocm": "cuda"}.get(kind, kind)
    if name not in known:
        raise ValueError(f"autocast on device kind {kind!r}: expected one of {', '.join([*known, 'rocm'])}")
    return AutocastLists(
        **{field.name: frozenset(known[name][field.name]) for field in fields(AutocastLists)}
    )
