"""`isotype.check`: traces and judges one training step of a model, a trainer or a request before it runs."""

from __future__ import annotations

import difflib
import importlib
import inspect
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from isotype.core import PACKAGE
from isotype.core.errors import Problem, UsageError
from isotype.precision.devices.room import Room
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.preflight.from_trainer import request_of_trainer
from isotype.preflight.run import run
from isotype.records.request import LossOf, StepRequest
from isotype.report.check.report import Report


class Options(TypedDict, total=False):
    """Keyword-only arguments of `check`; all but the last two are as in `StepRequest`."""

    learning_rate: float | None
    fsdp: int
    devices: int
    reshard: bool
    shard_integers: bool
    gradient_checkpointing: Mapping[str, Any] | bool | None
    generate: Callable[[nn.Module], Any] | None
    autocast_eval: bool
    fold: bool
    evaluation: Any
    accumulates: bool | int
    room: Room | None
    ranges: Ranges | None
    wiring: bool | Mapping[str, Any]
    verify: bool
    seconds: float


def check(
    model: Any,
    inputs: Any = None,
    policy: PrecisionPolicy | None = None,
    device: str | torch.device | None = None,
    autocast: str | torch.dtype | bool | None = None,
    scaler: bool | None = None,
    optimizer: Any = None,
    phases: Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Report:
    """Run one training step on fake tensors, report every dtype problem, and try the fixes.

    The model, the inputs and the random states stay unchanged; no weights are copied, and weights are read
    only for a float16 step, block by block, to measure its values.

    Args:
        model: any `nn.Module`, real or on the meta device; or a transformers/TRL trainer (with its first
            batch and arguments) or a `StepRequest`; then the other arguments are optional and replace those
            of the trainer or request.
        inputs: the keyword arguments the model is called with (labels included), or a callable model ->
            loss.
        policy: the model's intended policy; by default the one attached to it, if any.
        device: a device profile (`"t4"`) or a real device; by default the policy's, else the best one
            here.
        autocast: dtype of autocast around forward and loss; None: the policy's, else off; False: off.
        scaler: whether a GradScaler is used; None: with float16 autocast.
        optimizer: a name (`"adamw"`, `"adamw_fused"`, `"sgd"`, …), an optimizer, or a callable parameters
            -> optimizer; None: AdamW.
        phases: of the step, in order; `"generate"` adds a forward without labels and gradients; None:
            forward, backward, unscale, optimizer.
        **options: by keyword:

            - `learning_rate`: of the optimizer, for rules on lost updates.
            - `fsdp`: 0, or the version of FSDP the run is sharded by.
            - `devices`: how many devices train together (1); the memory is that of one of them. Without `fsdp` each holds
              all weights (DDP), with it a share.
            - `reshard`: whether FSDP frees a block's gathered weights after its forward (True).
            - `shard_integers`: whether FSDP shards frozen weights that are stored as integers (True), as isotype does and
              accelerate does not.
            - `gradient_checkpointing`: switch it on for the step: True, or the arguments of the model's
              `gradient_checkpointing_enable`; None leaves it as the model has it.
            - `generate`: what the phase `"generate"` runs, given the model.
            - `autocast_eval`: whether autocast is on in the phase `"generate"` too.
            - `fold`: trace layers that are equal but for their values once; what is found in one is said of all.
            - `evaluation`: the inputs of a batch that is evaluated between steps, as `inputs`: its memory is a phase of its own.
            - `accumulates`: micro-batches of these inputs in an optimizer step, or True for several (False).
            - `room`: what the step may take of the device's memory (`isotype.precision.devices.room.Room`); None: its share.
            - `ranges`: from `isotype.measure_ranges`, which says where float16 overflows. Without it a float16 step of a
              model whose weights are at hand is measured here, on these inputs, where that takes little time.
            - `wiring`: whether it is measured, on a small copy of the model, which inputs reach which predictions (True): packed
              rows, padding, later tokens, labels, pictures, adapters. The inputs need token ids with values, and labels.
            - `verify`: whether fixes are tried by a second trace each (True).
            - `seconds`: that the step may be traced for; what was seen until then is judged. Trials of fixes are
              not counted.

    Returns:
        The report: findings with their causes and the fixes that a second trace has proven, memory and
            FLOPs of the
        step. What cannot be traced is a finding (IST199), with all that was seen until then.

    Raises:
        UsageError: arguments that do not fit, all of them at once; something that is no model, trainer or
            request.
        PrecisionError: an unknown device or dtype.
        TypeError: an option that does not exist.
    """
    verify, seconds = options.pop("verify", True), options.pop("seconds", math.inf)
    _refuse_unknown(options)
    named = {
        "policy": policy,
        "device": device,
        "autocast": autocast,
        "scaler": scaler,
        "optimizer": optimizer,
        "phases": phases,
        **options,
    }
    changes = {name: value for name, value in named.items() if value is not None}
    if isinstance(model, nn.Module):
        request = StepRequest(model, inputs, **changes)
    elif isinstance(model, StepRequest):
        request = _changed(_with_inputs(model, inputs), changes)
    else:
        request = _changed(request_of_trainer(model, inputs), changes)
    return run(request, verify=verify, seconds=seconds)


def _changed(request: StepRequest, changes: dict[str, Any]) -> StepRequest:
    """Return a request with changes; a changed autocast resets the scaler, a changed optimizer the learning rate."""
    if "autocast" in changes:
        changes = {"scaler": None, **changes}
    if "optimizer" in changes and isinstance(changes["optimizer"], torch.optim.Optimizer):
        changes = {"learning_rate": None, **changes}  # its own
    return replace(request, **changes)


def _with_inputs(request: StepRequest, inputs: Any) -> StepRequest:
    """Return a request on other inputs; a loss over inputs keeps its function."""
    if inputs is None:
        return request
    over = isinstance(request.inputs, LossOf) and isinstance(inputs, Mapping)
    return replace(request, inputs=replace(request.inputs, inputs=dict(inputs)) if over else inputs)


def arguments_of_check() -> tuple[str, ...]:
    """Return the names of all arguments that `check` takes."""
    named = [name for name, value in signature(check).parameters.items() if value.kind != value.VAR_KEYWORD]
    return (*named, *Options.__annotations__)


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in options.keys() - {field.name for field in fields(StepRequest)}:
        near = difflib.get_close_matches(name, arguments_of_check(), n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"check() got an unexpected keyword argument {name!r}{hint}")


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
    if isinstance(error, SyntaxError):  # its message names the line
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
