"""JSON in and beside checkpoints: damaged text, duplicate names and values of the wrong type are errors."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import math
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from isotype.core.errors import CheckpointError, Problem


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise CheckpointError if it is not one, or cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        what, fix = f"{path}: {error}", "correct the file, or copy or download it again"
        raise CheckpointError.of(f"{path.name} is not JSON", what, "JSON", fix) from error
    if not isinstance(content, dict):
        what, fix = f"{path}: a JSON {type(content).__name__}", "copy or download the file again"
        raise CheckpointError.of(f"{path.name} is not an object", what, "a JSON object", fix)
    return content


def parse_unique(text: bytes) -> tuple[Any, list[str]]:
    """Return the content of JSON, and the duplicate names of its objects (`json` keeps the last)."""
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            twice.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return entries

    return json.loads(text, object_pairs_hook=unique), twice


class Entry(NamedTuple):
    """Valid values of some entries of an object.

    Attributes:
        names: a regular expression that matches their full names.
        kind: a type annotation; None for that of the library's own class.
        expected: the type in words; "" for words derived from it.
        low, high: limits of the numbers in a value.
    """

    names: str
    kind: Any = Any
    expected: str = ""
    low: float = -math.inf
    high: float = math.inf


def entry_problems(
    content: Mapping[str, Any],
    entries: Sequence[Entry],
    path: Path,
    fix: str,
    kinds: Mapping[str, Any] | None = None,
) -> Iterator[Problem]:
    """Yield values of the wrong type (default: from `kinds`) or beyond a limit, by the first matching entry."""
    for key, value in content.items():
        entry = next((each for each in entries if re.fullmatch(each.names, key)), Entry(key))
        fits, words = _rule((kinds or {})[key] if entry.kind is None else entry.kind)
        what = f"{path}: {key} is {value!r:.80}"
        if not fits(value):
            yield Problem(what, entry.expected or words, fix)
        elif not all(entry.low <= number <= entry.high for number in numbers_in(value)):
            limits = f"from {entry.low:g} to {entry.high:g}".replace("from -inf to", "of at most")
            numbers = "numbers" if isinstance(value, (list, dict)) else "a number"
            yield Problem(what, f"{numbers} {limits}", fix)


def numbers_in(value: Any) -> Iterator[float]:
    """Yield the numbers in a value, also in lists and objects; a bool is not a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(inner)


_NUMBERS: dict[Any, tuple[Any, str]] = {int: (int, "a whole number"), float: ((int, float), "a number")}
_PLAIN = {bool: "true or false", str: "text", types.NoneType: "null", dict: "an object", list: "a list"}


@functools.cache
def _rule(kind: Any) -> tuple[Callable[[Any], bool], str]:
    """Return a test of JSON values for an annotated type, and the type in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        # A text beside an enumeration is one of its values.
        listed = any(map(_is_enumeration, inner))
        rules = [_rule(each) for each in inner if not (listed and each is str)]
        names = sorted({words for _, words in rules}, key=lambda text: (text == "null", text))
        return lambda value: any(fits(value) for fits, _ in rules), " or ".join(names)
    if origin is Literal or _is_enumeration(kind):
        known = inner or [each.value for each in kind]
        words = f"one of {', '.join(map(str, known))}"
        return lambda value: any(value == each and type(value) is type(each) for each in known), words
    if origin in (list, set, tuple):
        fits, words = _rule(inner[0])
        counts = (len(inner),) if origin is tuple else range(sys.maxsize)
        return (
            lambda value: isinstance(value, list) and len(value) in counts and all(map(fits, value)),
            f"a list of {words}",
        )
    if origin is dict:
        fits, words = _rule(inner[1])
        return (
            lambda value: isinstance(value, dict) and all(map(fits, value.values())),
            f"an object of {words}",
        )
    if kind in _NUMBERS:
        classes, words = _NUMBERS[kind]
        return (
            lambda value: (
                isinstance(value, classes) and not isinstance(value, bool) and abs(value) < math.inf
            ),
            words,
        )
    if kind in _PLAIN:
        return lambda value: isinstance(value, kind), _PLAIN[kind]
    return lambda value: isinstance(value, dict) or not dataclasses.is_dataclass(kind), "an object"


def _is_enumeration(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, enum.Enum)
