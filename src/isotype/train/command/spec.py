"""The arguments of the training commands as data, so that parsing needs no import of a trainer, which takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from isotype.core.arguments import wrong_choice
from isotype.core.errors import Problem
from isotype.data.methods import METHODS

AUTO = "auto"
PLANNED = ("per_device_train_batch_size", "max_length", "quantization")
"""Arguments whose `auto` a plan of the machine resolves."""
RECOMPUTE = ("gradient_checkpointing", "activation_checkpointing")
"""The argument and its newer name in transformers 5.23; `auto` decides by the step's estimated memory."""

Holder = Literal["script", "training", "model", "dataset", "isotype"]
HOLDERS: tuple[Holder, ...] = ("script", "training", "model", "dataset", "isotype")
"""Dataclasses with arguments, in the order of `Method.dataclass_types`."""

TABLE = Path(__file__).with_name("table.json")
_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


def boolean(text: str) -> bool:
    """Return the truth value of a word, as transformers reads it.

    Raises:
        ValueError: it has none.
    """
    word = text.lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError(text)
    return word in _TRUE


_READERS: Mapping[str, tuple[Callable[[str], Any], tuple[type, ...], str, str]] = {
    "int": (int, (int,), "a whole number", "8"),
    "float": (float, (int, float), "a number", "0.1"),
    "bool": (boolean, (bool,), "True or False", "True"),
    "str": (str, (str, dict, list, int, float, bool), "a text", "VALUE"),
}
"""Kind -> parser of texts, accepted types of YAML and Python, expectation, example."""


@dataclass(frozen=True)
class Spec:
    """An argument of a training command.

    Attributes:
        name: without dashes.
        holder: its dataclass.
        kind: `int`, `float`, `bool` or `str`.
        default: isotype's.
        bare: `--name` alone means True.
        many: it takes several values.
        none: `none` means None.
        negated: `--no_name` means False.
        choices: valid values; empty for any.
        aliases: short names.
        help: description.
    """

    name: str
    holder: Holder
    kind: str
    default: Any = None
    bare: bool = False
    many: bool = False
    none: bool = False
    negated: bool = False
    choices: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    help: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings of its name on a command line."""
        return tuple(dict.fromkeys((f"--{self.name}", f"--{self.name.replace('_', '-')}", *self.aliases)))

    @property
    def takes_auto(self) -> bool:
        """True if `auto` is a valid value."""
        return self.name in PLANNED or self.name in RECOMPUTE

    def read(self, given: Any) -> tuple[Any, Problem | None]:
        """Return (value, None) of a text or of a value of YAML or Python, or (None, problem).

        A list is read element by element if the argument takes several values.
        """
        if self.many and isinstance(given, (list, tuple, set, frozenset)):
            read = [
                self._read_one(each)
                for each in (sorted(given) if isinstance(given, (set, frozenset)) else given)
            ]
            return [value for value, _ in read], next((problem for _, problem in read if problem), None)
        value, problem = self._read_one(given)
        return ([value] if self.many and not isinstance(value, str) and problem is None else value), problem

    def _read_one(self, given: Any) -> tuple[Any, Problem | None]:
        convert, types, expected, example = _READERS[self.kind]
        if isinstance(given, str) and self.takes_auto and given.lower() == AUTO:
            return AUTO, None
        if given is None or (self.none and isinstance(given, str) and given.lower() in ("none", "null")):
            return None, None
        if self.kind == "bool" and given in (0, 1):
            return bool(given), None
        if given is False and "no" in self.choices:
            return "no", None  # YAML reads a bare `no` so
        if isinstance(given, str):
            try:
                value = convert(given)
            except ValueError:
                value = None
        else:
            right = isinstance(given, types) and (bool in types or not isinstance(given, bool))
            value = given if right else None
        if value is None:
            return None, Problem(f"--{self.name} {given}", expected, f"--{self.name} {example}")
        if self.choices and value not in self.choices:
            return None, wrong_choice(f"--{self.name} {given}", str(value), map(str, self.choices))
        return value, None


@cache
def specs(method: str) -> Mapping[str, Spec]:
    """Return the arguments of a method by name, those of TRL's, transformers' and isotype's dataclasses."""
    entries: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["arguments"]
    chosen = [entry for entry in entries if method in entry.pop("methods", METHODS)]
    for entry in chosen:
        entry |= {key: tuple(entry[key]) for key in ("choices", "aliases") if key in entry}
    return {entry["name"]: Spec(**entry) for entry in chosen}
