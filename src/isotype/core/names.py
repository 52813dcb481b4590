"""Names of modules, places and counts as they are written everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable

from isotype.compat.wrappers import BETWEEN


def starred(name: str) -> str:
    """A fully qualified name with `*` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def distinct_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names with `*` for the numbers of layers, each once."""
    return tuple(dict.fromkeys(map(starred, names)))


def listed(names: Iterable[str], shown: int = 3) -> str:
    """`a, b, c and 4 more`; a module without a name is `the model`."""
    named_ones = [named(name) for name in names]
    rest = len(named_ones) - shown
    return ", ".join(named_ones[:shown]) + (f" and {rest:,} more" if rest > 0 else "")


_COPIES = re.compile(r"\.(token_adapter|modules_to_save\.default|default)(?=\.|$)")


def plain_name(name: str) -> str:
    """The name that the model's author gave: without the parts that wrappers add."""
    while f"{name}.".startswith(("base_model.model.", "module.")):
        name = f"{name}.".removeprefix("base_model.model.").removeprefix("module.").removesuffix(".")
    return ".".join(part for part in unparametrized(name).split(".") if part not in BETWEEN)


def unparametrized(name: str) -> str:
    """The name of a parameter that a parametrization computes, of that of what it is computed from."""
    return _PARAMETRIZED.sub(r"\1", name)


_PARAMETRIZED = re.compile(r"(?:^|(?<=\.))parametrizations\.(\w+)\.original(?=\.|$)")


def base_name(name: str) -> str:
    """The name in the base model of a module or a parameter of a PEFT model, or of one in an adapter file."""
    return _COPIES.sub("", plain_name("" if name == "base_model" else name))


def named(module: str) -> str:
    """A module's fully qualified name; the outermost one has none."""
    return module or "the model"


def short(source: str) -> str:
    """`modeling_llama.py:64`: the file's name is enough for a reader who knows the module."""
    return source.rpartition("/")[2]


def plural(count: int, noun: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


EXPERT = re.compile(r"expert|moe(?![a-z])", re.IGNORECASE)


def stacked(names: Iterable[str]) -> str:
    """The noun for weights of three dimensions: a Conv1d and a projector have such, too, and are no experts."""
    return "stacked expert weight" if all(map(EXPERT.search, names)) else "3-D weight"


def agree(count: int, noun: str, verb: str) -> str:
    """`3 weights hold`, `1 weight holds`."""
    return f"{plural(count, noun)} {_SINGULAR.get(verb, f'{verb}s') if count == 1 else verb}"


_SINGULAR = {"are": "is", "have": "has", "can": "can"}
