"""`isotype.check`: reports on one training step of a model, a trainer or a request, before the step runs."""

import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from isotype.core import PACKAGE
from isotype.core.arguments import did_you_mean
from isotype.core.errors import Problem, UsageError
from isotype.core.names import in_module
from isotype.core.optimizers import optimizers_in
from isotype.model.shard import free_gathered
from isotype.precision.devices.room import Room
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.preflight.from_trainer import request_of_trainer
from isotype.preflight.run import run
from isotype.records.finding import in_library
from isotype.records.request import LossOf, StepRequest
from isotype.report.check.report import Report
from isotype.trace.dtype_history import remembered


class Options(TypedDict, total=False):
    """Keyword-only arguments of `check`. All except `verify` and `seconds` are fields of `StepRequest`."""

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

    `check` does not change the model, the inputs and the random states, and copies no weights. For a float16 step, `check`
    also measures value ranges. This reads the weights block by block.

    Args:
        model: any `nn.Module`, real or on the meta device; or a transformers or TRL trainer; or a `StepRequest`. For a trainer,
            the step uses the trainer's first batch and arguments. Other arguments of `check` replace the values of a trainer or
            request.
        inputs: the keyword arguments of a call of the model (labels included), or a callable model -> loss.
        policy: the intended policy of the model. The default is the policy that is attached to the model, if there is one.
        device: a device profile (`"t4"`) or a real device. The default is the policy's device, or this machine's best device.
        autocast: dtype of autocast around forward and loss, or False for no autocast. The default is the autocast of the
            policy. Without a policy, the default is no autocast.
        scaler: True if a GradScaler is used. By default, a GradScaler is used only with float16 autocast.
        optimizer: a name (`"adamw"`, `"adamw_fused"`, `"sgd"`, …), an optimizer, a list of optimizers, or a function from
            parameters to an optimizer. The default is AdamW.
        phases: phases of the step, in order. The default is forward, backward, unscale, optimizer. The phase `"generate"` is a
            forward without labels and gradients.
        **options: by keyword:

            - `learning_rate`: the learning rate of the optimizer, for the rules on lost updates.
            - `fsdp`: 0, or the version of FSDP that shards the training.
            - `devices`: number of devices that train together (default 1); the report shows the memory of one device.
              With `fsdp`, each device holds a share of the weights; otherwise, each device holds all weights (DDP).
            - `reshard`: whether FSDP frees a block's gathered weights after its forward (default True).
            - `shard_integers`: whether FSDP shards frozen weights that are stored as integers (default True). isotype
              shards these weights; accelerate does not.
            - `gradient_checkpointing`: True, or the arguments of the model's `gradient_checkpointing_enable`. By
              default, the model's own setting is used.
            - `generate`: the function of the model that the phase `"generate"` runs.
            - `autocast_eval`: whether autocast is also active in the phase `"generate"`.
            - `fold`: whether only one of several layers that differ only in their values is traced. A finding about
              this layer is then about all of them.
            - `evaluation`: a batch that is evaluated between steps, in the form of `inputs`. The report shows the
              evaluation's memory as a separate phase.
            - `accumulates`: number of micro-batches in an optimizer step, or True for several (default False).
            - `room`: memory that the step may use (`isotype.precision.devices.room.Room`); by default a share of all
              memory.
            - `ranges`: the result of `isotype.measure_ranges`, for the rules on float16 overflow. By default, `check`
              measures the values of a float16 step on these inputs, if the model has its weights and the measurement is
              short.
            - `wiring`: whether `check` measures which inputs change which predictions (default True): packed rows,
              padding, later tokens, labels, images and adapters. The measurement runs a small copy of the model, and
              needs labels, and token ids with known values.
            - `verify`: whether every fix is tried by a second trace (default True).
            - `seconds`: time limit of the trace, without the trials of fixes. At the limit, the trace ends, and the
              report is about the traced part.

    Returns:
        The report: findings with their causes, fixes that another trace has verified, memory and FLOPs of the step. If a
        step cannot be traced to its end, the report has the finding IST199.

    Raises:
        UsageError: some arguments exclude each other, or `model` is no model, trainer or request.
        PrecisionError: a device or dtype is unknown.
        TypeError: an option does not exist.
    """
    verify, seconds = options.pop("verify", True), options.pop("seconds", math.inf)
    for name in options.keys() - {field.name for field in fields(StepRequest)}:
        hint = did_you_mean(name, arguments_of_check(), "", n=1, shown=repr)
        raise TypeError(f"check() got an unexpected keyword argument {name!r}{hint and f': {hint}'}")
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
        request = _changed(request_of_trainer(model, inputs, device), changes)
    free_gathered(request.model)  # FSDP2 keeps parameters that a forward without a backward has gathered
    return run(request, verify=verify, seconds=seconds)


def _changed(request: StepRequest, changes: dict[str, Any]) -> StepRequest:
    """Return a changed request. A new autocast resets the scaler, and a new optimizer object resets the learning rate."""
    if "autocast" in changes:
        changes = {"scaler": None, **changes}
    if optimizers_in(changes.get("optimizer")):
        changes = {"learning_rate": None, **changes}  # the optimizer has a learning rate
    return replace(request, **changes)


def _with_inputs(request: StepRequest, inputs: Any) -> StepRequest:
    """Return a copy of a request with other inputs. If the inputs are a batch, the loss function of the request is kept."""
    if inputs is None:
        return request
    over = isinstance(request.inputs, LossOf) and isinstance(inputs, Mapping)
    return replace(request, inputs=replace(request.inputs, inputs=dict(inputs)) if over else inputs)


def arguments_of_check() -> tuple[str, ...]:
    named = [name for name in inspect.signature(check).parameters if name != "options"]
    return (*named, *Options.__annotations__)


_RETURNS = "(model, inputs), or a dict with model, inputs and other arguments of isotype.check"


def function_arguments(text: str) -> dict[str, Any]:
    """Call the function `package.module:function` and return its result as arguments of `isotype.check`.

    Raises UsageError if the module or the function does not exist, the function fails, or its result has another
    type.
    """
    module, attribute = _module(text), text.partition(":")[2]
    function = getattr(module, attribute, None)
    if not callable(function):
        fix = did_you_mean(attribute, [n for n, v in vars(module).items() if callable(v)], "check its name")
        what = f"{text}: no function {attribute} in {module.__file__}"
        raise UsageError.of("no such function", what, "a function", fix)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        what = f"{text}{inspect.signature(function)}: {error}"
        fix = "give the parameters default values, or name a function that calls this function"
        raise UsageError.of("the function cannot be called", what, "no required parameters", fix) from error
    try:
        with remembered():
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
        if error.name is None or not in_module(name, error.name):
            raise _failed(text, "importing it", error) from error
        stem = name.removesuffix(".py")
        bare = f"{stem}:{text.partition(':')[2]}"
        is_file = name.endswith(".py") and Path(f"{stem}.py").is_file()
        fix = f"isotype check {bare}" if is_file else "check the name of the module and the working directory"
        expected = "a module that can be imported from the working directory, without .py"
        raise UsageError.of("no such module", f"{text}: no module {error.name}", expected, fix) from error
    except Exception as error:
        raise _failed(text, "importing it", error) from error
    finally:
        sys.path.remove(str(Path.cwd()))


def _failed(text: str, doing: str, error: Exception) -> UsageError:
    what = f"{text}: {doing} raised {type(error).__name__}: {error}{_line(error)}"
    fix = "correct the function; --debug shows the whole traceback"
    return UsageError.of("the function fails", what, f"a function that returns {_RETURNS}", fix)


def _line(error: Exception) -> str:
    """Return the innermost line of the user's code in the traceback; "" if there is no such line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    if not frames or isinstance(error, SyntaxError):  # the message of a SyntaxError names the line
        return ""
    return f"\n    at        {frames[-1].filename}:{frames[-1].lineno}   {frames[-1].line}"


def _is_users(filename: str) -> bool:
    library = filename.startswith("<frozen") or in_library(f"{filename}:")
    return not library and PACKAGE not in Path(filename).parents


def _arguments(text: str, result: Any) -> dict[str, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return {"model": result[0], "inputs": result[1]}
    if not (isinstance(result, Mapping) and {"model", "inputs"} <= set(result)):
        what = f"{text} returns {_words(result)}"
        raise UsageError.of(
            "the function does not return a model with its inputs", what, _RETURNS, "return one of these"
        )
    known = arguments_of_check()
    others = (name for name in result if name not in known)
    fixes = {name: did_you_mean(str(name), known, "omit it", n=1, shown=repr) for name in others}
    unknown = [Problem(repr(name), f"one of {', '.join(known)}", fix) for name, fix in fixes.items()]
    if unknown:
        raise UsageError(f"{text} returns arguments that isotype.check does not have", unknown)
    return dict(result)


def _words(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"a dict of {', '.join(map(repr, result)) or 'nothing'}"
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
