"""Reads the JSON files of checkpoints, and finds names that occur twice and values of the wrong type."""

import dataclasses
import enum
import functools
import inspect
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from isotype.core.errors import CheckpointError, Problem

AGAIN = "correct the file, or copy or download it again"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise CheckpointError if the file contains anything else."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError.of(f"{path.name} is not JSON", f"{path}: {error}", "JSON", AGAIN) from error
    if not isinstance(content, dict):
        what = f"{path}: a JSON {type(content).__name__}"
        raise CheckpointError.of(f"{path.name} is not an object", what, "a JSON object", AGAIN)
    return content


class Entry(NamedTuple):
    """A rule for the values of those JSON entries whose names match `names`.

    Attributes:
        names: a regular expression for the full name of an entry.
        kind: type annotation of the value. If it is None, the caller of `entry_problems` passes it in `kinds`.
        expected: description of the type. If it is "", the description is derived from `kind`.
        low, high: smallest and largest valid number. If the value is a list, `low` and `high` apply to the numbers in the list.
    """

    names: str
    kind: Any = Any
    expected: str = ""
    low: float = -math.inf
    high: float = math.inf


def entry_problems(
    content: Mapping[str, Any], entries: Sequence[Entry], path: Path, kinds: Mapping[str, Any] | None = None
) -> Iterator[Problem]:
    """Yield a problem for each value that contradicts the first `Entry` for its key. `kinds[name]` replaces `kind=None`."""
    for key, value in content.items():
        entry = next((entry for entry in entries if re.fullmatch(entry.names, key)), Entry(key))
        fits, words = _rule((kinds or {})[key] if entry.kind is None else entry.kind)
        what = f"{path}: {key} is {value!r:.80}"
        if not fits(value):
            yield Problem(what, entry.expected or words, AGAIN)
        elif not all(entry.low <= number <= entry.high for number in numbers_in(value)):
            limits = f"from {entry.low:g} to {entry.high:g}".replace("from -inf to", "of at most")
            numbers = "numbers" if isinstance(value, (list, dict)) else "a number"
            yield Problem(what, f"{numbers} {limits}", AGAIN)


def numbers_in(value: Any) -> Iterator[float]:
    """Yield the numbers, but not the booleans, in a JSON value and in its lists and objects."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(inner)


_NUMBERS: dict[Any, tuple[Any, str]] = {int: (int, "a whole number"), float: ((int, float), "a number")}
_PLAIN = {bool: "true or false", str: "text", types.NoneType: "null", dict: "an object", list: "a list"}


@functools.cache
def _rule(kind: Any) -> tuple[Callable[[Any], bool], str]:
    """Return (function that returns True if a JSON value has the type `kind`, description of the type)."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        # In a union of str and an enumeration, the text must be a value of the enumeration.
        listed = any(map(_is_enumeration, inner))
        rules = [_rule(member) for member in inner if not (listed and member is str)]
        names = sorted({words for _, words in rules}, key=lambda text: (text == "null", text))
        return lambda value: any(fits(value) for fits, _ in rules), " or ".join(names)
    if origin is Literal or _is_enumeration(kind):
        choices = inner or [member.value for member in kind]
        words = f"one of {', '.join(map(str, choices))}"
        return lambda value: any(value == c and type(value) is type(c) for c in choices), words
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
