"""Requests for a script's step, built before it and checked then or after a crash."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from isotype.compat.accelerate import is_prepared, mixed_precision
from isotype.compat.torch import fake_errors_unlogged, no_modes, tree_map
from isotype.core.dtypes import autocast_dtype
from isotype.core.optimizers import learning_rate_of
from isotype.preflight.run import run
from isotype.records.request import DEFAULT_PHASES, LossOf, StepRequest
from isotype.report.check.report import Report
from isotype.trace.fake.twin import fake_mode
from isotype.trace.live.forward import enumerate_inputs
from isotype.trace.live.recorder import device_of
from isotype.trace.live.watch import Beginning

TRIED_BEFORE = 2.0
"""Seconds for trying fixes before the first step, where most scripts have none to fix."""

TRIED_AFTER = 60.0
"""Seconds for trying fixes after a crash."""


def look_ahead(request: StepRequest, tried: float, seconds: float = math.inf) -> Report:
    """Return the report on a script's step without changing the script's state.

    `tried`: seconds for trying the fixes; `seconds`: for tracing the step.
    """
    with _unnoticed():
        fake_mode()  # the first one makes torch import for seconds, which would distort the trial's time
        report = run(request, verify=False, seconds=seconds, measure=False)
        if report.findings and report.seconds < seconds and _trial_seconds(report) <= tried:
            report = run(request, measure=False)
    return report


def without_tensors(request: StepRequest) -> partial[StepRequest]:
    """Return a function from the model to the request; it keeps only the shapes of the script's inputs."""
    kept = {each.name: getattr(request, each.name) for each in fields(request) if each.name != "model"}
    shapes = tree_map(_shape_only, request.inputs.inputs)
    return partial(StepRequest, **{**kept, "inputs": replace(request.inputs, inputs=shapes)})


def request_of_script(
    beginning: Beginning, loss: Any, device: str | None, phases: Sequence[str] = DEFAULT_PHASES
) -> StepRequest:
    """Return the step that begins with this forward.

    Args:
        beginning: the forward.
        loss: (model, inputs) -> loss.
        device: the simulated profile; None for the model's device.
        phases: of the step; only `"generate"` for a forward without gradients.
    """
    model = unwrapped(beginning.model)
    here = device_of(model)
    optimizer, scaler = _helpers(model)
    autocast = autocast_of(model, here)
    return StepRequest(
        model,
        LossOf(loss, _inputs(beginning)),
        device=device or here,
        autocast=autocast or False,
        scaler=scaler,
        optimizer=_asked(optimizer) or "adamw",
        phases=tuple(phases),
        learning_rate=None if optimizer is None else learning_rate_of(optimizer),
        autocast_eval=autocast is not None,
    )


def call_with(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Call a model as the script did: positional inputs are numbered."""
    args = [value for name, value in inputs.items() if name.startswith("argument ")]
    return model(*args, **{k: v for k, v in inputs.items() if not k.startswith("argument ")})


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of a wrapper that distributes it over devices."""
    inner = getattr(model, "module", None)
    wraps = type(model).__name__ in ("DistributedDataParallel", "DataParallel")  # by name, to import neither
    return inner if wraps and isinstance(inner, nn.Module) else model


def tried(report: Report) -> bool:
    """Return whether the fixes were tried: a tried fix has an outcome."""
    fixes = [fix for finding in report.findings for fix in finding.fixes if fix.scope != "advice"]
    return not fixes or any(fix.outcome for fix in fixes)


def rank() -> int:
    """Return the rank of this process; 0 if it trains alone."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """Disable the script's modes, and hide output and warnings of its code."""
    output = contextlib.redirect_stdout(io.StringIO())
    with no_modes(), fake_errors_unlogged(), output, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _trial_seconds(report: Report) -> float:
    trials = {fix.actions for finding in report.findings for fix in finding.fixes if fix.actions}
    return report.seconds * len(trials)


def _inputs(beginning: Beginning) -> Mapping[str, Any]:
    if beginning.inputs is not None:
        return beginning.inputs
    return dict(enumerate_inputs(beginning.args, beginning.kwargs))


def _shape_only(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _asked(optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the optimizer as an argument of `check`, without its parameters."""
    if optimizer is None:
        return None
    if type(optimizer).__module__.startswith("bitsandbytes"):
        return type(optimizer).__name__.lower()  # bitsandbytes' kernels, which `check` knows by name
    known = signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return type(optimizer)([nn.Parameter(torch.zeros(1))], **options)


def _helpers(model: nn.Module) -> tuple[torch.optim.Optimizer | None, bool]:
    """Return the optimizer of `model`, and whether an enabled GradScaler exists, by searching all objects."""
    parameters = {id(parameter) for parameter in model.parameters()}
    optimizer, scaler = None, False
    for thing in gc.get_objects():
        # Not isinstance: that would load a lazy object of the script.
        if issubclass(type(thing), torch.amp.GradScaler):
            scaler = scaler or thing.is_enabled()
        elif issubclass(type(thing), torch.optim.Optimizer) and not hasattr(thing, "optimizer"):
            trained = (parameter for group in thing.param_groups for parameter in group["params"])
            if any(id(parameter) in parameters for parameter in trained):
                optimizer = thing
    return optimizer, scaler


def autocast_of(model: nn.Module, device: str) -> torch.dtype | None:
    """Return the current autocast dtype of a forward of `model`, or accelerate's around it.

    Accelerate's is inside the forward: the trace ahead runs under it on a CPU, but not for other devices.
    """
    low = autocast_dtype(device)
    if low is not None:
        return low
    if device == "cpu" or not is_prepared(model):
        return None
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(mixed_precision())
