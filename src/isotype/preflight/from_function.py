"""`package.module:function`: imports and calls user code that builds a model and its inputs."""

from __future__ import annotations

import difflib
import importlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from isotype.core.errors import Problem, UsageError
from isotype.core.package import PACKAGE
from isotype.preflight.check import arguments_of_check

_RETURNS = "(model, inputs), or a dict with model, inputs and other arguments of isotype.check"


def function_arguments(text: str) -> dict[str, Any]:
    """Return the result of `package.module:function` as arguments of `isotype.check`.

    Raises:
        UsageError: there is no such module or function, it raises, or it returns something else.
    """
    module, attribute = _module(text), text.partition(":")[2]
    function = getattr(module, attribute, None)
    if not callable(function):
        near = difflib.get_close_matches(attribute, [n for n, v in vars(module).items() if callable(v)], n=3)
        fix = f"did you mean {' or '.join(near)}?" if near else "check its name"
        raise UsageError.of(
            "no such function",
            f"{text}: no function {attribute} in {module.__file__}",
            "a function",
            fix,
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        what = f"{text}{inspect.signature(function)}: {error}"
        fix = "give its parameters defaults, or name a function that calls it"
        raise UsageError.of("the function cannot be called", what, "no required parameters", fix) from error
    try:
        result = function()
    except Exception as error:
        raise _failed(text, "calling it", error) from error
    return _arguments(text, result)


def _module(text: str) -> Any:
    name = text.partition(":")[0]
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(text, "importing it", error) from error
        stem = name.removesuffix(".py")
        bare = f"{stem}:{text.partition(':')[2]}"
        is_file = name.endswith(".py") and Path(f"{stem}.py").is_file()
        fix = f"isotype check {bare}" if is_file else "check its name and the directory that you are in"
        raise UsageError.of(
            "no such module",
            f"{text}: no module {error.name}",
            "a module that can be imported from here, without .py",
            fix,
        ) from error
    except Exception as error:
        raise _failed(text, "importing it", error) from error
    finally:
        sys.path.remove(str(Path.cwd()))


def _failed(text: str, doing: str, error: Exception) -> UsageError:
    """Return the error for user code that raised, with its message and line."""
    what = f"{text}: {doing} raised {type(error).__name__}: {error}{_line(error)}"
    return UsageError.of(
        "the function fails",
        what,
        f"a function that returns {_RETURNS}",
        "correct it; --debug shows the whole traceback",
    )


def _line(error: Exception) -> str:
    """Return the line of user code (outside of installed packages and isotype) that raised."""
    if isinstance(error, SyntaxError):  # the message contains the line
        return ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    if not frames:
        return ""
    last = frames[-1]
    code = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"\n    at        {last.filename}:{last.lineno}   {code}"


def _is_users(filename: str) -> bool:
    return (
        "site-packages" not in filename
        and "<frozen" not in filename
        and PACKAGE not in Path(filename).parents
        and not filename.startswith(sys.base_prefix + "/lib")
    )


def _arguments(text: str, result: Any) -> dict[str, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return {"model": result[0], "inputs": result[1]}
    if not (isinstance(result, Mapping) and {"model", "inputs"} <= set(result)):
        what = f"{text} returns {_words(result)}"
        raise UsageError.of("the function returns something else", what, _RETURNS, "return one of these")
    unknown = list(_unknown(result))
    if unknown:
        raise UsageError(f"{text} returns arguments that isotype.check does not take", unknown)
    return dict(result)


def _words(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"a dict of {', '.join(map(repr, result)) or 'nothing'}"
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__


def _unknown(names: Iterable[str]) -> Iterable[Problem]:
    known = arguments_of_check()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else "leave it out"
            yield Problem(repr(name), f"one of {', '.join(known)}", fix)
