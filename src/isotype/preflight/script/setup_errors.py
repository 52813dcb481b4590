"""Explains errors that occur while a script loads, moves or quantizes a model, adds an adapter, or builds a trainer."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib.metadata import packages_distributions, version
from traceback import walk_tb
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import own_modules, own_parameters
from isotype.core.arguments import RENAMED
from isotype.core.dtypes import dtype_name
from isotype.core.names import agree, base_name
from isotype.core.source import line_of
from isotype.core.tables import table
from isotype.model.shard import is_sharded
from isotype.model.walk import is_packed
from isotype.preflight.script.outside import Outside
from isotype.records.finding import in_library
from isotype.trace.dtype_history import set_at

_KNOWN: list[dict[str, str]] = table(__file__)
"""`error` matches the message, and then file and function of each frame. `weights`: key of `_OF_KIND` for the cause, or ""."""
_OF_KIND: dict[str, Callable[[torch.Tensor, Sequence[torch.dtype], Sequence[torch.dtype]], bool]] = {
    "meta": lambda weight, _, __: weight.is_meta,
    "codes": lambda weight, _, __: not weight.is_floating_point(),
    "packed": lambda weight, _, __: is_packed(weight),
    "stored": lambda weight, _, whole: (
        weight.is_floating_point() and is_packed(weight) and weight.dtype not in whole
    ),
    "few": lambda weight, dtypes, _: weight.dtype != dtypes[0],
    "whole": lambda weight, _, __: not is_sharded(weight),
}
"""Maps a kind to a function of a weight, all weights' dtypes (the most frequent first), and those of weights without 4-bit codes."""
_ADVICE: dict[str, str] = table(__file__, "old_names.json")
"""Maps an argument, class, function or module that a library no longer has to advice."""
_UNKNOWN = re.compile(
    r"(?P<callee>\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(?P<name>\w+)'"
)
_ABSENT = re.compile(
    r"cannot import name '(?P<name>\w+)' from '(?P<package>\w+)|No module named '(?P<in>\w+)\.(?P<module>[\w.]+)'"
)


def explained(error: BaseException) -> Outside | None:
    """Return the cause and the fix of a known error; None for other errors."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    codes = [frame.f_code for frame in reversed(frames)]
    text = "".join((str(error), *(f"\nin {code.co_filename} {code.co_name}" for code in codes)))
    for known in _KNOWN:
        match = re.search(known["error"], text, re.DOTALL)
        words = None if match is None else _weight_words(error, known["weights"])
        if match is not None and words is not None:
            cause, how = (known[part].format(**match.groupdict(), **words) for part in ("cause", "help"))
            return Outside(line_of_script(error), (), how, cause)
    return _absent_name(error) if isinstance(error, ImportError) else _unknown_argument(error)


def _absent_name(error: ImportError) -> Outside | None:
    """Explain a name or module that the installed version of a library does not have; None for other errors."""
    match = _ABSENT.search(str(error))
    package = "" if match is None else match["package"] or match["in"]
    if match is None or (installed := _installed(package)) is None:
        return None
    frames = reversed([frame for frame, _ in walk_tb(error.__traceback__)])
    names = (
        str(frame.f_globals.get("__name__"))
        for frame in frames
        if "importlib" not in frame.f_code.co_filename
    )
    importer = next(names, "").partition(".")[0]
    advice = _advice(match["name"] or match["module"], "", package)
    if importer != package and (library := _installed(importer)) is not None:
        advice = (
            f"{library} needs another version of {package}: upgrade {importer}, or install an older {package}"
        )
    return Outside(
        line_of_script(error), (), advice, f"{installed} does not contain {match['name'] or match['module']}"
    )


def _advice(name: str, how: str, package: str) -> str:
    """Return advice about a name that an installed library does not have. `how` is the advice for names without known advice."""
    ways = _ADVICE.get(name, how), f"install the version of {package} for which the script was written"
    return ", or ".join(filter(None, ways))


def _installed(package: str) -> str | None:
    """Return the name and the installed version of the library that contains `package`; None for the script's modules."""
    distributions = packages_distributions().get(package)
    return None if distributions is None else f"{package} {version(distributions[0])}"


def _unknown_argument(error: BaseException) -> Outside | None:
    """Explain a keyword argument that the installed version of a library does not have; None for other errors."""
    match = _UNKNOWN.search(str(error))
    called = None if match is None else _called(error, match["callee"])
    if match is None or called is None:
        return None
    package, name = called.__module__.partition(".")[0], match["name"]
    if (installed := _installed(package)) is None:
        return None
    code = getattr(vars(called).get("__init__", called), "__code__", None)
    # `from_pretrained` takes its arguments from **kwargs, and gives those that it does not know to the model.
    running = (frame.f_code for frame, _ in walk_tb(error.__traceback__))
    passed = [c for c in running if in_library(f"{c.co_filename}:0")]
    codes = [code, *passed] if isinstance(code, CodeType) else passed
    known = {word for c in codes for word in c.co_varnames[: c.co_argcount + c.co_kwonlyargcount]} - {name}
    known |= {word for c in passed for word in c.co_consts if isinstance(word, str) and word != name}
    new = next(iter([*RENAMED.get(name, ()), *get_close_matches(name, sorted(known), 1, 0.8)]), "")
    # TRL's trainers have the arguments of a training in a class of the same name: SFTConfig for SFTTrainer.
    config = getattr(sys.modules[called.__module__], called.__name__.replace("Trainer", "Config"), None)
    fields = getattr(config, "__dataclass_fields__", {}) if config is not called else {}
    how = f"write {new} instead" if new in known else "omit the argument"
    if moved := next((field for field in (name, new) if field in fields), None):
        how = (
            f"pass {moved} to {called.__name__.replace('Trainer', 'Config')}, which the trainer gets as args"
        )
    cause = f"{called.__name__} of {installed} has no argument {name}"
    return Outside(line_of_script(error), (), _advice(name, how, package), cause)


def _called(error: BaseException, name: str) -> Any:
    """Return the class or function with this name in the variables of a traceback's frames; None without one."""
    for frame, _ in reversed([*walk_tb(error.__traceback__)]):
        variables = [*frame.f_locals.values(), *frame.f_globals.values()]
        members = (vars(value).get(name) for value in variables if isinstance(value, ModuleType))
        for value in (*variables, *members):
            if isinstance(value, (type, FunctionType)) and value.__name__ == name:
                return value
    return None


def line_of_script(error: BaseException) -> str:
    """Return `file:line` of the innermost frame outside of installed packages, or else `line_of(error)`."""
    places = (f"{frame.f_code.co_filename}:{line}" for frame, line in walk_tb(error.__traceback__))
    files = (place for place in reversed([*places]) if not place.startswith("<"))
    return next((place for place in files if not in_library(place)), line_of(error))


def _weight_words(error: BaseException, kind: str) -> dict[str, str] | None:
    """Return name, dtype and count of the weights of `kind` in the traceback's largest model; None if it has no such weights."""
    if not kind:
        return {}
    variables = [value for frame, _ in walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    modules = [value for value in variables if isinstance(value, nn.Module)]
    # FSDP's constructor has not set its wrapped module yet. Then each missing attribute is an endless recursion.
    modules = [module for module in modules if own_modules(module) or own_parameters(module)]
    model = max(modules, key=lambda module: sum(1 for _ in module.parameters()), default=nn.Module())
    names = {id(module): name for name, module in model.named_modules()}
    # PEFT's copy of a layer is not in the model yet; the original layer is.
    inner = (getattr(module, "original_module", module) for module in reversed(modules))
    inside = next((names[id(module)] for module in inner if id(module) in names), "")
    weights = dict(model.named_parameters())
    dtypes = _by_size(weights.values())
    whole = _by_size(weight for weight in weights.values() if not is_packed(weight))
    fits = {name: weight for name, weight in weights.items() if _OF_KIND[kind](weight, dtypes, whole)}
    if not fits:
        return None
    first = min(fits, key=lambda name: not name.startswith(inside))
    dtype = fits[first].dtype
    other = next(
        (name for name, weight in weights.items() if weight.dtype != dtype and weight.is_floating_point()), ""
    )
    return {
        "name": base_name(first),
        "dtype": dtype_name(dtype),
        "line": _line_of(model, first),
        "other": other
        and f"{base_name(other)} is {dtype_name(weights[other].dtype)}{_line_of(model, other)}",
        "usual": str(next(iter(whole), "")),
        "count": agree(len(fits), "parameter", "are"),
    }


def _by_size(weights: Iterable[torch.Tensor]) -> list[torch.dtype]:
    """Return the dtypes of weights, beginning with the dtype of most elements."""
    sizes: Counter[torch.dtype] = Counter()
    for weight in weights:
        sizes[weight.dtype] += weight.numel()
    return [dtype for dtype, _ in sizes.most_common()]


def _line_of(model: nn.Module, name: str) -> str:
    """Return a clause on how the parameter `name` got its dtype; "" if this is unknown."""
    module, _, parameter = name.rpartition(".")
    return (text := set_at(model.get_submodule(module), parameter)) and f", {text}"
