"""Finds reward functions for `isotype grpo` and `rloo` by the same names that `trl grpo` accepts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import iscoroutinefunction
from pathlib import Path
from traceback import extract_tb
from typing import Any

from torch import nn

from isotype.core.errors import Problem, TrainingError, UsageError, first_line
from isotype.core.source import line_of

BUILT_IN = (
    "accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment",
)  # fmt: skip


def reward_functions(names: Sequence[str] | None, reward_model: str | None) -> list[Any]:
    """Return the reward model's path (if given) and the functions in `names` (TRL's, or others as `module.function`)."""
    functions: list[Any] = [reward_model] if reward_model else []
    problems = []
    for name in names or ():
        function = _built_in(name) if name in BUILT_IN else _dotted(name)
        if isinstance(function, Problem):
            problems.append(function)
        else:
            functions.append(_explained(function))
    if not functions and not problems:
        what = "no --reward_funcs and no --reward_model_name_or_path"
        fix = f"give --reward_funcs with one of {', '.join(BUILT_IN)} or a dotted path such as my_rewards.length"
        problems.append(Problem(what, "at least one reward", fix))
    if problems:
        raise UsageError("rewards that cannot be used", problems)
    return functions


def _explained(function: Any) -> Any:
    if isinstance(function, nn.Module):
        return function  # a reward model
    name = getattr(function, "__name__", type(function).__name__)

    @contextmanager
    def explained() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise TrainingError.of(
                "a reward function failed",
                f"{name}: {type(error).__name__}: {first_line(error)}   at {_line_in(function, error)}",
                "a list with a float for each completion",
                "correct the function; a chat's completions are lists of messages, whose text is "
                'completion[0]["content"]',
            ) from error

    if not iscoroutinefunction(function):
        return explained()(function)

    @wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with explained():
            return await function(*args, **kwargs)

    return awaited


def _line_in(function: Any, error: Exception) -> str:
    """Return `file:line` of the last frame in the traceback that is in the same file as the function."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else line_of(error)


def _built_in(name: str) -> Any:
    from trl import rewards

    function = getattr(rewards, name)
    # The values that `trl grpo` passes.
    return function(max_completion_len=1280, soft_punish_cache=256) if name.startswith("get_") else function


def _dotted(name: str) -> Any:
    module_name, _, function_name = name.rpartition(".")
    if not module_name:
        expected = f"one of {', '.join(BUILT_IN)} or module.function"
        return Problem(f"--reward_funcs {name}", expected, "check the name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        what = f"--reward_funcs {name}: {error}"
        return Problem(what, "a module that can be imported from the current directory", "check the path")
    function = getattr(module, function_name, None)
    if not callable(function):
        what = f"--reward_funcs {name}: {module.__name__} has no function {function_name}"
        return Problem(what, "a function (completions, **columns) -> list of float", "check the name")
    return function
