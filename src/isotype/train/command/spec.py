"""The arguments of the training commands as data, so that a command is parsed without importing its trainer, which takes seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from isotype.compat.standard import actions_of
from isotype.core.arguments import wrong_choice
from isotype.core.errors import Problem
from isotype.data.methods import METHODS

AUTO = "auto"
PLANNED = ("per_device_train_batch_size", "max_length", "quantization")
"""Arguments whose `auto` a plan of the machine resolves."""
RECOMPUTE = ("gradient_checkpointing", "activation_checkpointing")
"""The argument, and the newer name that transformers 5.23 has for it; `auto` is by the foreseen memory of the step."""

Holder = Literal["script", "training", "model", "dataset", "isotype"]
HOLDERS: tuple[Holder, ...] = ("script", "training", "model", "dataset", "isotype")
"""Dataclasses that hold arguments, in the order in which `Method.dataclass_types` has them."""

TABLE = Path(__file__).with_name("table.json")
LIBRARIES = ("trl", "transformers")
"""Libraries whose dataclasses the table lists."""

_DEFAULTS = {"dtype": "auto", "use_peft": True, "lora_target_modules": "all-linear"}
_RECOMPUTE_HELP = (
    "auto|true|false",
    "Compute activations again in the backward, for less memory and a slower step. auto (default): only in as many layers as the "
    "device's memory asks for.",
)
_HELP: Mapping[str, tuple[str, str]] = {
    "dtype": (
        "auto|float32|bfloat16|float16",
        "Compute dtype; the weights follow. auto: the dtype the checkpoint was trained in, where the device runs it.",
    ),
    **dict.fromkeys(RECOMPUTE, _RECOMPUTE_HELP),
    "use_peft": (
        "true|false",
        "Train adapters on a frozen base (the default here); --use_peft False trains every weight.",
    ),
}
"""Arguments that mean something else here than in TRL -> their values and their help."""
_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


def boolean(text: str) -> bool:
    """The truth value that a word stands for, by the words that transformers takes.

    Raises:
        ValueError: it stands for none.
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
"""Kind -> how a text is read, the types of YAML and Python that it has, what is expected, an example."""


@dataclass(frozen=True)
class Spec:
    """An argument of a training command.

    Attributes:
        name: without the dashes.
        holder: the dataclass that holds it.
        kind: `int`, `float`, `bool` or `str`.
        default: isotype's.
        bare: whether `--name` alone means True.
        many: whether it takes several values.
        none: whether `none` stands for None.
        negated: whether `--no_name` stands for False.
        choices: what it takes; empty for anything.
        aliases: its short names.
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

    @property
    def flags(self) -> tuple[str, ...]:
        """Every way to write its name on a command line."""
        return tuple(dict.fromkeys((f"--{self.name}", f"--{self.name.replace('_', '-')}", *self.aliases)))

    @property
    def takes_auto(self) -> bool:
        """Whether `auto` is one of its values."""
        return self.name in PLANNED or self.name in RECOMPUTE

    def read(self, given: Any) -> tuple[Any, Problem | None]:
        """(value, None) of a text, or of a value of YAML or Python; (None, what is wrong with it).

        A list is read one by one where the argument takes several values.
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
    """The arguments of a method by name: of the table, where it is of the libraries that are installed, else of these."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if any(version(name) != table["libraries"][name] for name in LIBRARIES):
        return described(method)
    entries: list[dict[str, Any]] = table["arguments"]
    chosen = [entry for entry in entries if method in entry.pop("methods", METHODS)]
    for entry in chosen:
        entry |= {key: tuple(entry[key]) for key in ("choices", "aliases") if key in entry}
    return {entry["name"]: Spec(**entry) for entry in chosen}


# The table, as a tool writes it from the dataclasses that are installed.


def described(method: str) -> dict[str, Spec]:
    """The arguments of a method as its dataclasses have them, with isotype's defaults."""
    parser = library_parser(method)
    kept = [_held(kind) for kind in parser.dataclass_types]
    holder_of = {name: holder for holder, names in zip(HOLDERS, kept, strict=True) for name in names}
    found: dict[str, Spec] = {}
    for action in actions_of(parser):
        name = action.dest
        if name not in holder_of:
            continue
        if name in found:  # --no_name, which comes behind
            found[name] = Spec(**{**vars(found[name]), "negated": True})
            continue
        kind, none = _kind(action.type)
        long = [
            flag for flag in action.option_strings if not re.fullmatch(f"--{name.replace('_', '[-_]')}", flag)
        ]
        found[name] = Spec(
            name=name,
            holder=holder_of[name],
            kind=kind,
            default=_plain(
                _DEFAULTS.get(name, METHODS[method].task_type if name == "lora_task_type" else action.default)
            ),
            bare=action.nargs == "?" or name == "bf16",  # as --fp16
            many=action.nargs == "+",
            none=none,
            choices=() if name == "dtype" else tuple(map(_plain, action.choices or ())),
            aliases=tuple(long),
        )
    return found


def library_parser(method: str) -> Any:
    """TRL's own parser of a method, with isotype's arguments: what the table is made of, and the long help."""
    from trl import TrlParser

    from isotype.train.command.arguments import IsotypeArguments

    return TrlParser((*METHODS[method].dataclass_types(), IsotypeArguments), prog=f"isotype {method}")


def help_parser(method: str) -> Any:
    """The parser whose help lists every argument of a method."""
    parser, known = library_parser(method), specs(method)
    parser.description = (
        f"{METHODS[method].title}, under one precision policy. Takes the arguments of `trl {method}`."
    )
    parser.set_defaults(**{name: known[name].default for name in (*_DEFAULTS, "lora_task_type")})
    for action in actions_of(parser):
        if action.dest in _HELP:
            action.metavar, action.help = _HELP[action.dest]
            action.choices = None
    return parser


def _held(kind: Any) -> set[str]:
    assert is_dataclass(kind)
    return {each.name for each in fields(kind) if each.init}


def _kind(convert: Any) -> tuple[str, bool]:
    """(kind, whether `none` is None) by the function that the parser reads a text with."""
    path = getattr(convert, "__qualname__", "")
    name = getattr(convert, "__name__", "")
    known = {"string_to_bool": "bool", "int": "int", "float": "float"}
    return known.get(name, "str"), path.startswith("_accept_none")


def _plain(value: Any) -> Any:
    """A default as JSON has it."""
    if value is MISSING:
        return None
    return getattr(value, "value", list(value) if isinstance(value, (list, tuple)) else value)


def table_text() -> str:
    """The table of every method: an argument a line; `methods` where not all have it, or have it alike."""
    by_entry: dict[str, list[str]] = {}
    for method in METHODS:
        for spec in described(method).values():
            blank = Spec(spec.name, spec.holder, spec.kind)
            entry = {
                key: value
                for key, value in vars(spec).items()
                if key in ("name", "holder", "kind") or value != getattr(blank, key)
            }
            by_entry.setdefault(json.dumps(entry), []).append(method)
    lines = [
        text if len(methods) == len(METHODS) else f'{text[:-1]}, "methods": {json.dumps(methods)}}}'
        for text, methods in by_entry.items()
    ]
    libraries = json.dumps({name: version(name) for name in LIBRARIES})
    return f'{{"libraries": {libraries}, "arguments": [\n' + ",\n".join(lines) + "\n]}\n"
