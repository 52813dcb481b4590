"""Builds the request for a step of a script before this step runs. The check runs before the step, or after a crash."""

import contextlib
import gc
import io
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.compat.accelerate import is_prepared, mixed_precision
from isotype.compat.torch import fake_errors_unlogged, no_modes, tree_map
from isotype.core.dtypes import autocast_dtype
from isotype.core.optimizers import are_masters, names_instead, parameters_of
from isotype.model.loss import find_loss, float_tensors, loss_of
from isotype.model.walk import living
from isotype.preflight.run import run
from isotype.ranges.twin import unwrapped
from isotype.records.request import DEFAULT_PHASES, LossOf, StepRequest
from isotype.report.check.report import Report
from isotype.trace.fake.code import LossOfOutput
from isotype.trace.fake.twin import fake_mode
from isotype.trace.live.forward import Beginning
from isotype.trace.live.recorder import device_of
from isotype.trace.script import script_files

TRIED_BEFORE = 2.0
"""Fixes are tried before the first step if the estimated time of all trials is at most this many seconds."""

TRIED_AFTER = 60.0
"""Fixes are tried after a crash if the estimated time of all trials is at most this many seconds."""
_SMALL = 2**20  # elements


def look_ahead(request: StepRequest, trial_seconds: float, seconds: float = math.inf) -> Report:
    """Trace the step of a script within `seconds`. Try the fixes if all trials are estimated to take at most `trial_seconds`."""
    with _unnoticed():
        fake_mode()  # the first fake mode imports parts of torch for seconds, which would count as time of the trace
        report = run(request, verify=False, seconds=seconds, measure=False)
        trials = {fix.actions for finding in report.findings for fix in finding.fixes if fix.actions}
        if report.findings and report.seconds < seconds and report.seconds * len(trials) <= trial_seconds:
            known = None if report.trace.failure and report.trace.failure.phase == "load" else report.trace
            report = run(request, measure=False, traced=known)
    return report


def without_tensors(request: StepRequest) -> partial[StepRequest]:
    """Return a function from a model to the request. The returned function keeps neither the model of the request nor
    the values of float inputs.

    The function keeps small integer inputs, because their values decide shapes. An example is the grid of Qwen-VL's
    patches.
    """

    def without_values(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        small = not leaf.is_floating_point() and leaf.numel() <= _SMALL
        return leaf.detach().clone() if small else leaf.detach().to("meta")

    values = {field.name: getattr(request, field.name) for field in fields(request) if field.name != "model"}
    values["inputs"] = replace(request.inputs, inputs=tree_map(without_values, request.inputs.inputs))
    return partial(StepRequest, **values)


def request_of_script(
    beginning: Beginning, loss: Any, device: str | None, phases: Sequence[str] = DEFAULT_PHASES
) -> StepRequest:
    """Return the request for the step that begins with a forward of the script's model.

    Args:
        loss: function from (model, inputs) to the loss.
        device: the device profile to simulate, or None for the model's device.
        phases: the phases of the step. For a forward without gradients, the only phase is `"generate"`.
    """
    model = unwrapped(beginning.model)
    here = device_of(model)
    optimizers, scaler = _helpers(model)
    autocast = autocast_of(model, here)
    if not optimizers:  # the update is unknown
        phases = [phase for phase in phases if phase not in ("unscale", "optimizer")]
        masters = (are_masters([*parameters_of(other)], model) for other in living(torch.optim.Optimizer))
        half = any(parameter.dtype == torch.float16 for parameter in model.parameters())
        scaler = scaler or (half and any(masters))  # then the script scales the loss itself
    return StepRequest(
        model,
        LossOf(loss, beginning.inputs),
        device=device or here,
        autocast=autocast or False,
        scaler=scaler,
        optimizer=[names_instead(optimizer, model) for optimizer in optimizers] or "adamw",
        phases=tuple(phases),
        autocast_eval=autocast is not None,
    )


class LossOfForward(LossOfOutput):
    """Calls the model, or a `method` of it, with the arguments that the script used, and returns the loss in the output."""

    def __init__(self, method: str) -> None:
        # Lightning's bf16-true changes the default dtype for the step only. After a crash, the step is traced again.
        self._method, self._default_dtype = method, torch.get_default_dtype()

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        plain: Any = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            model.forward = plain  # the method may call it
            return getattr(model, self._method)(*args, **kwargs)

        if self._method:  # a fix can cast the inputs of a forward
            model.forward = forward
        # Positional inputs have the names `argument 0`, `argument 1`, …
        args = [value for name, value in inputs.items() if name.startswith("argument ")]
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._default_dtype)
        try:
            output = model(*args, **{k: v for k, v in inputs.items() if not k.startswith("argument ")})
        finally:
            torch.set_default_dtype(before)
        self.partial = find_loss(output) is None
        trainable = torch.is_grad_enabled() or next(float_tensors(output), None) is not None
        return loss_of(output) if trainable else torch.zeros(())


def tried(report: Report) -> bool:
    """Return True if the fixes of a report were tried, or if the report has no fixes."""
    fixes = [fix for finding in report.findings for fix in finding.fixes if fix.scope != "advice"]
    return not fixes or any(fix.outcome for fix in fixes)


def rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """In the `with` block, turn off the script's function modes, dispatch modes, output and warnings."""
    output = contextlib.redirect_stdout(io.StringIO())
    with no_modes(), fake_errors_unlogged(), output, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _helpers(model: nn.Module) -> tuple[list[torch.optim.Optimizer], bool]:
    """Return the optimizers of `model` among all objects of the process, and True if there is an enabled GradScaler.

    If several optimizers share a parameter, only the newest is returned, because the script has replaced the others.
    """
    parameters, taken = {id(parameter) for parameter in model.parameters()}, set[int]()
    optimizers: list[torch.optim.Optimizer] = []
    for candidate in reversed([*living(torch.optim.Optimizer)]):
        members = {*map(id, parameters_of(candidate))}
        if not hasattr(candidate, "optimizer") and parameters & members and taken.isdisjoint(members):
            optimizers.append(candidate)
            taken |= members
    if any(living(torch.amp.GradScaler)):
        gc.collect()  # a GradScaler in a reference cycle is not the script's
    enabled = any(scaler.is_enabled() for scaler in living(torch.amp.GradScaler))
    return optimizers[::-1], enabled and not _never_scales()


def steps_scaled() -> bool:
    """Return True if accelerate calls an optimizer's step through an enabled GradScaler, whatever the script does."""
    scalers = (getattr(optimizer, "scaler", None) for optimizer in living(torch.optim.Optimizer))
    return any(isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() for scaler in scalers)


def _never_scales() -> bool:
    """Return True if the script's files construct a GradScaler, but neither these files nor a library's loop scale a loss."""
    text = "".join(code for _, code in script_files())
    return "GradScaler(" in text and not any(call in text for call in (".scale(", "Accelerator(", "Fabric("))


def autocast_of(model: nn.Module, device: str) -> torch.dtype | None:
    """Return the dtype of the current autocast, or of the autocast that accelerate adds to `model`'s forward; else None."""
    low = autocast_dtype(device)
    if low is not None or not is_prepared(model):
        return low
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(mixed_precision())
