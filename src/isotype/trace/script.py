"""Reads the script's code for misspelt arguments, and for reasons of dtypes that no traced operator shows."""

import ast
import inspect
import linecache
import sys
from collections.abc import Container, Iterable, Iterator
from difflib import SequenceMatcher, get_close_matches
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import nn

from isotype.compat.torch_casts import weights_in
from isotype.core.dtypes import dtype_name
from isotype.model.walk import derives_from, living
from isotype.records.finding import in_library
from isotype.trace.dtype_history import default_dtypes, set_at

_QUANTIZATION = "QuantizationConfigMixin"
_ACCEPT_ANY_NAME = {"PreTrainedConfig", "PretrainedConfig", _QUANTIZATION}


def script_files() -> Iterator[tuple[ModuleType, str]]:
    """Yield each module of the script with its code; modules of libraries and of isotype are left out."""
    for name in ("__main__", *_names_in_script(len(sys.modules), next(reversed(sys.modules)))):
        module = sys.modules.get(name)
        if module is not None and (file := _file_in_script(name, module)):
            lines = linecache.getlines(file)
            if (known := _codes.get(file)) is None or known[0] is not lines:
                known = _codes[file] = lines, "".join(lines)
            yield module, known[1]


_codes: dict[str, tuple[list[str], str]] = {}
"""File -> the list of its lines in `linecache`, and the code. A string keeps its hash, so one string per file is fast."""


@lru_cache(maxsize=1)
def _names_in_script(count: int, last: str) -> tuple[str, ...]:
    """Return the names of the script's modules. `count` and `last` change if a module is imported."""
    modules = [*sys.modules.items()]
    return tuple(name for name, module in modules if name != "__main__" and _file_in_script(name, module))


def _file_in_script(name: str, module: ModuleType) -> str:
    """Return the file of a module; "" if the module has none, or belongs to a library or to isotype."""
    file = getattr(module, "__file__", None) if name.partition(".")[0] != "isotype" else None
    return "" if file is None or in_library(f"{file}:0") else file


def misspelt_arguments() -> tuple[tuple[str, str, str, str], ...]:
    """Return the misspelt arguments of configs in the script's code, as `Trace.misspelt`."""
    library, misspelt = sys.modules.get("transformers"), []
    for module, code in script_files():
        for name, call in _calls(code):
            of_library = getattr(library, name, None) if name.endswith("Config") else None
            config = vars(module).get(name, of_library)
            if isinstance(config, type):
                rows = _misspelt_in(config, call)
                misspelt += [(name, a, meant, f"{module.__file__}:{line}") for a, meant, line in rows]
    return tuple(dict.fromkeys(misspelt))


@cache
def _misspelt_in(config: type, call: ast.Call) -> tuple[tuple[str, str, int], ...]:
    """Return (argument, intended argument, line) of each misspelt argument in a call of a class."""
    if not any(derives_from(config, base) for base in _ACCEPT_ANY_NAME):
        return ()
    words = {word.arg: word.lineno for word in call.keywords if word.arg}
    meant = ((argument, _meant(config, argument, words), line) for argument, line in words.items())
    return tuple(row for row in meant if row[1])


def dtype_reasons(model: nn.Module) -> dict[torch.dtype, str]:
    """Return dtype -> reason, for weights' dtypes that a global setting chose: the default dtype, or a 16-bit evaluation."""
    weights = [
        (w.dtype, set_at(part, name)) for part in model.modules() for name, w in weights_in(part).items()
    ]
    created = {dtype for dtype, line in weights if not line or line.startswith("created")}
    reasons = {
        dtype: f"{line} sets torch's default dtype, so later weights are {dtype_name(dtype)}"
        for dtype, line in default_dtypes.items()
    }
    default = torch.get_default_dtype()
    reasons.setdefault(default, f"torch's default dtype is {dtype_name(default)}")
    reasons = {d: reason for d, reason in reasons.items() if d in created and d != torch.float32}
    trained = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
    stored = getattr(getattr(model, "config", None), "dtype", None)
    lines = [line for dtype, line in weights if dtype == trained]
    differs = isinstance(stored, torch.dtype) and trained != stored
    if differs and (how := cast_by_evaluation(trained, lines)):
        reasons[trained] = how
    return reasons


def cast_by_evaluation(dtype: torch.dtype, lines: Iterable[str]) -> str:
    """Return a text if this process has `TrainingArguments` whose evaluation casts the model to `dtype`; else "".

    `lines` are the texts of `set_at` for these weights.
    """
    flag = {torch.bfloat16: "bf16_full_eval", torch.float16: "fp16_full_eval"}.get(dtype, "")
    if all(how and " by evaluate at " not in how and " by predict at " not in how for how in lines):
        return ""
    library = sys.modules.get("transformers.training_args")
    settings = living(library.TrainingArguments) if library is not None and flag else ()
    return f"{flag}=True casts the model in evaluate()" if any(getattr(s, flag) for s in settings) else ""


@cache
def _calls(code: str) -> tuple[tuple[str, ast.Call], ...]:
    """Return each call of a class with keyword arguments in the code, with the class's name."""
    if not any(name in code for name in ("transformers", "diffusers")):
        return ()
    try:
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and node.keywords]
    except SyntaxError:
        return ()  # a notebook
    named = ((getattr(call.func, "id", getattr(call.func, "attr", "")), call) for call in calls)
    return tuple((name, call) for name, call in named if name[:1].isupper())


def _meant(config: type, argument: str, words: Container[str]) -> str:
    """Return the argument of `config` that was misspelt as `argument`; "" if `argument` may be intended."""
    parameters = [*inspect.signature(config).parameters]
    if argument in parameters or hasattr(config, argument) or argument in _words(config):
        return ""
    absent = [name for name in parameters if name not in words]
    if derives_from(config, _QUANTIZATION):  # code of users reads no other attributes of such a config
        near = get_close_matches(argument, absent, 1, 0.85)
        near += [name for name in absent if name.endswith(f"_{argument}")]
    else:
        near = [name for name in absent if _is_same(argument.split("_"), name.split("_"))]
    return next(iter(near), "")


def _is_same(words: list[str], others: list[str]) -> bool:
    """Return whether the words of two names are equal, except for one letter of longer words."""
    ratios = (SequenceMatcher(None, *pair).ratio() for pair in zip(words, others, strict=False))
    return len(words) == len(others) and min(ratios) > 0.87


@cache
def _words(config: type) -> set[Any]:
    """Return the constants in the constructors of a class, such as the names of old arguments that they accept."""
    functions = (vars(c).get(name) for c in config.__mro__ for name in ("__init__", "__post_init__"))
    codes = (getattr(inspect.unwrap(f), "__code__", None) for f in functions if callable(f))
    constants = {constant for code in codes if code is not None for constant in code.co_consts}
    return constants | {*getattr(config, "attribute_map", ())}
