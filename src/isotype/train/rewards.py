"""Finds reward functions for `isotype grpo` and `rloo` by the same names that `trl grpo` accepts."""

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import Any

from torch import nn

from isotype.core.errors import DataError, Problem, TrainingError, UsageError, error_line
from isotype.core.source import line_of
from isotype.data.columns import near, quoted
from isotype.precision.devices.profile import device_profile
from isotype.train.command.settings import Settings

BUILT_IN = (
    "accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment",
)  # fmt: skip

_VALUES = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Keyword arguments that TRL passes to every reward function, in addition to the columns of the rows."""

_UNPASSED = {"prompt", "completion", "completion_ids"}
"""Columns that TRL does not pass (`_calculate_rewards` in trl/trainer/grpo_trainer.py)."""


def rewards_of(settings: Settings) -> dict[str, Any]:
    """Return the trainer's argument `reward_funcs` as a dict; an empty dict for a method without rewards."""
    if "reward_funcs" not in settings.command.specs:
        return {}
    functions = reward_functions(settings.reward_funcs, settings.reward_model_name_or_path)
    weights = settings.reward_weights
    if weights is not None and len(weights) != len(functions):
        what = f"--reward_weights with {len(weights)} values"
        expected = f"{len(functions)}, one for each reward"
        raise UsageError.of("rewards that cannot be used", what, expected, "set a weight for each reward")
    return {"reward_funcs": functions}


def check_rewards(settings: Settings, rewards: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Raise DataError if a reward function does not accept the columns that the trainer will pass."""
    # The path of a reward model is not callable.
    functions = [function for function in rewards.get("reward_funcs", ()) if callable(function)]
    names = settings.reward_funcs or () if functions else ()
    splits = [settings.dataset_train_split]
    splits += [settings.dataset_test_split] * (settings.eval_strategy != "no" and settings.eval_split is None)
    rows: list[dict[str, Any]] = [next(iter(data[split]), {}) for split in splits]
    if settings.remove_unused_columns:
        rows = [{name: row[name] for name in ("prompt", "image", "images") if name in row} for row in rows]
    problems = {
        problem: None
        for row in rows
        for name, function in zip(names, functions, strict=True)
        for problem in _unfit(f"--reward_funcs {name}", function, row, settings.columns)
    }
    if problems:
        raise DataError("a reward function does not fit the data", list(problems))


def rewards_here(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """Return (reward functions, notes) for a check.

    If this machine lacks the training's device, a missing function is a note, and not an error.
    """
    needed = "reward_funcs" in settings.command.specs
    if needed and not settings.reward_funcs and not settings.reward_model_name_or_path:
        return {}, [f"no reward is named yet: isotype {settings.method.name} needs --reward_funcs"]
    try:
        return rewards_of(settings), []
    except UsageError as error:
        if device_profile(settings.device).present:
            raise
        return {}, [f"the reward functions were not checked: {error.problems[0].given}"]


def _unfit(flag: str, function: Any, row: Mapping[str, Any], renamed: str | None) -> Iterator[Problem]:
    """Yield a problem if TRL cannot call the function for rows like `row`. `renamed` is the value of `--columns`."""
    if isinstance(function, nn.Module):
        return
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C has no signature
        return
    passed = {*_VALUES, *(row.keys() - _UNPASSED)}
    for parameter in signature.parameters.values():
        name = parameter.name
        optional = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if optional or parameter.default is not parameter.empty or name in passed:
            continue
        columns = sorted(row.keys() - _UNPASSED)
        pairs = ",".join(filter(None, (renamed, f"{name}={near(name, columns) or 'COLUMN'}")))
        fix = f"--columns {pairs}, or give the parameter a default value"
        if f"{name}s" in _VALUES:
            fix = f"name the parameter {name}s"
        what = f"{flag} needs a column '{name}'; the columns for rewards are {quoted(columns)}"
        yield Problem(what, f"a column for each parameter except {', '.join(_VALUES)}", fix)
        return
    try:
        signature.bind(**dict.fromkeys(passed))
    except TypeError as error:
        expected = f"a function that accepts {', '.join(_VALUES)} and each column by keyword"
        yield Problem(f"{flag}: {error}", expected, "add **kwargs to the parameters of the function")
    if _of_trl(function) and "completions" in signature.parameters and isinstance(row.get("prompt"), str):
        expected = "prompts as lists of messages, because the function reads the content of a message"
        fix = "--apply_chat_template True, which turns prompts into user messages"
        yield Problem(f"{flag} with prompts of plain text", expected, fix)


def _of_trl(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("trl.rewards")


def reward_functions(names: Sequence[str] | None, reward_model: str | None) -> list[Any]:
    """Return the reward model's path (if given) and the functions in `names` (TRL's, or others as `module.function`)."""
    functions: list[Any] = [reward_model] if reward_model else []
    problems = []
    for name in names or ():
        function = _built_in(name) if name in BUILT_IN else _dotted(name)
        verifies = getattr(function, "__name__", "").endswith("accuracy_reward") and _of_trl(function)
        if verifies and find_spec("math_verify") is None:
            what, expected = f"--reward_funcs {name}", "the package math_verify, which is not installed"
            function = Problem(what, expected, "pip install math-verify, or omit the function")
        if isinstance(function, Problem):
            problems.append(function)
        else:
            functions.append(_explained(function))
    if not functions and not problems:
        what = "no --reward_funcs and no --reward_model_name_or_path"
        fix = f"set --reward_funcs to one of {', '.join(BUILT_IN)} or to a dotted path such as my_rewards.length"
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
                f"{name}: {error_line(error)}   at {_line_in(function, error)}",
                "a list with a float for each completion",
                "correct the function; completions of a chat are lists of messages, whose text is "
                'completion[0]["content"]',
            ) from error

    if not inspect.iscoroutinefunction(function):
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
