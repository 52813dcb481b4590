"""Finds misspelt arguments of configs in the script's code: the configs of transformers accept any name."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Iterator
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from types import ModuleType
from typing import Any

from isotype.records.finding import in_library
from isotype.records.trace import Misspelt

_QUANTIZATION = "QuantizationConfigMixin"
_ACCEPT_ANY_NAME = {"PreTrainedConfig", "PretrainedConfig", _QUANTIZATION}


def script_files() -> Iterator[tuple[ModuleType, str]]:
    """Yield each module of the script with its code; modules of libraries and of isotype are left out."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) if name.partition(".")[0] != "isotype" else None
        if file is not None and not in_library(f"{file}:0"):
            yield module, "".join(linecache.getlines(file))


def misspelt_arguments() -> tuple[Misspelt, ...]:
    """Return the arguments of configs in the script's code that have no effect because they are misspelt."""
    library, misspelt = sys.modules.get("transformers"), []
    for module, code in script_files():
        for name, words in _calls(code):
            of_library = getattr(library, name, None) if name.endswith("Config") else None
            config = vars(module).get(name, of_library)
            if isinstance(config, type) and not _ACCEPT_ANY_NAME.isdisjoint(_bases(config)):
                meant = {argument: _meant(config, argument, words) for argument in words}
                lines = ((argument, f"{module.__file__}:{words[argument]}") for argument in words)
                misspelt += [Misspelt(name, a, meant[a], line) for a, line in lines if meant[a]]
    return tuple(dict.fromkeys(misspelt))


@cache
def _calls(code: str) -> tuple[tuple[str, dict[str, int]], ...]:
    """Return, for each call, the name of the called function, and the names of its arguments with their lines."""
    if "transformers" not in code and "diffusers" not in code:
        return ()
    try:
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    except SyntaxError:
        return ()  # a notebook
    named = ((getattr(call.func, "id", getattr(call.func, "attr", "")), call.keywords) for call in calls)
    return tuple((name, {word.arg: word.lineno for word in words if word.arg}) for name, words in named)


def _meant(config: type, argument: str, words: dict[str, int]) -> str:
    """Return the argument of `config` that was misspelt as `argument`; "" if `argument` may be intended."""
    parameters = [*inspect.signature(config).parameters]
    if argument in parameters or hasattr(config, argument) or argument in _words(config):
        return ""
    absent = [name for name in parameters if name not in words]
    if _QUANTIZATION in _bases(config):  # code of users reads no other attributes of such a config
        near = get_close_matches(argument, absent, 1, 0.85)
        near += [name for name in absent if name.endswith(f"_{argument}")]
    else:
        near = [name for name in absent if _is_same(argument.split("_"), name.split("_"))]
    return next(iter(near), "")


def _is_same(words: list[str], others: list[str]) -> bool:
    """Return whether the words of two names are equal, except for one or two letters of longer words."""
    pairs = [*zip(words, others, strict=False)]
    near = (
        max(map(len, pair)) > 3 and SequenceMatcher(None, *pair).ratio() > 0.87
        for pair in pairs
        if len({*pair}) > 1
    )
    return len(words) == len(others) and all(near)


def _bases(config: type) -> set[str]:
    return {base.__name__ for base in config.__mro__}


@cache
def _words(config: type) -> set[Any]:
    """Return the constants in the constructors of a class, such as the names of old arguments that they accept."""
    functions = (vars(c).get(name) for c in config.__mro__ for name in ("__init__", "__post_init__"))
    codes = (getattr(inspect.unwrap(f), "__code__", None) for f in functions if callable(f))
    constants = {constant for code in codes if code is not None for constant in code.co_consts}
    return constants | {*getattr(config, "attribute_map", ())}
