"""Names of modules, places and counts in messages and reports."""

from __future__ import annotations

import re
from collections.abc import Iterable

from isotype.compat.wrappers import BETWEEN


def starred(name: str) -> str:
    """Return a fully qualified name with `*` for layer numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def distinct_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names after replacing layer numbers by `*`."""
    return tuple(dict.fromkeys(map(starred, names)))


def listed(names: Iterable[str], shown: int = 3) -> str:
    """Return names as `a, b, c and 4 more`; a module without a name is `the model`."""
    named_ones = [named(name) for name in names]
    rest = len(named_ones) - shown
    return ", ".join(named_ones[:shown]) + (f" and {rest:,} more" if rest > 0 else "")


_COPIES = re.compile(r"\.(token_adapter|modules_to_save\.default|default)(?=\.|$)")


def plain_name(name: str) -> str:
    """Return the module name in the model's source, without the parts that wrappers add."""
    while f"{name}.".startswith(("base_model.model.", "module.")):
        name = f"{name}.".removeprefix("base_model.model.").removeprefix("module.").removesuffix(".")
    return ".".join(part for part in unparametrized(name).split(".") if part not in BETWEEN)


def unparametrized(name: str) -> str:
    """Return the parameter's name without the parts that `torch.nn.utils.parametrize` adds."""
    return _PARAMETRIZED.sub(r"\1", name)


_PARAMETRIZED = re.compile(r"(?:^|(?<=\.))parametrizations\.(\w+)\.original(?=\.|$)")


def base_name(name: str) -> str:
    """Return the base model's name for a module or parameter of a PEFT model or adapter file."""
    return _COPIES.sub("", plain_name("" if name == "base_model" else name))


def named(module: str) -> str:
    """Return a module's fully qualified name, or `the model` for the root."""
    return module or "the model"


def short(source: str) -> str:
    """Return a source without its folder: `modeling_llama.py:64`."""
    return source.rpartition("/")[2]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 error`, `2 errors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


EXPERT = re.compile(r"expert|moe(?![a-z])", re.IGNORECASE)


def stacked(names: Iterable[str]) -> str:
    """Return the noun for 3-D weights: those of a Conv1d or a projector are not experts."""
    return "stacked expert weight" if all(map(EXPERT.search, names)) else "3-D weight"


def agree(count: int, noun: str, verb: str) -> str:
    """Return a count with noun and verb: `3 weights hold`, `1 weight holds`."""
    return f"{plural(count, noun)} {_SINGULAR.get(verb, f'{verb}s') if count == 1 else verb}"


_SINGULAR = {"are": "is", "have": "has", "can": "can"}
