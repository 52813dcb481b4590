"""The check of a trainer's step when its first batch reaches the model."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from accelerate.utils import is_compiled_module
from torch import nn

from isotype.core.errors import first_line
from isotype.core.source import line_of
from isotype.lora.loss.trl_head import passed_on, without_its_padding
from isotype.lora.unpadded import traced_as
from isotype.precision.ranges import Ranges
from isotype.preflight.from_trainer import request_of_first_step
from isotype.preflight.run import run
from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.report.check.report import Report

logger = logging.getLogger("isotype")


def before_first_step(
    model: nn.Module,
    arguments: Any,
    optimizer: Any,
    tell: Callable[[Report], None],
    outermost: nn.Module | None = None,
    ranges: Ranges | Literal["measure"] | None = "measure",
) -> None:
    """Check the step of a running trainer when its first training batch reaches the model.

    Args:
        optimizer: accelerate's, with its GradScaler.
        tell: called with the report before that batch's forward; may raise.
        outermost: the model as the trainer calls it. If compiled as a whole, only its own hooks run outside of the
            graph.
        ranges: measured value ranges; None: unknown; `measure`: a float16 step is measured on this batch.
    """

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        handle.remove()
        try:
            with traced_as(without_its_padding(model, args, kwargs)):
                request = request_of_first_step(model, (args, kwargs), arguments, optimizer)
                known = None if ranges == "measure" else ranges
                wiring = passed_on(model, request.inputs.inputs)
                request = replace(request, ranges=known, wiring=wiring)
                report = run(request, verify=False, measure=ranges == "measure")
        except Exception as error:  # noqa: BLE001 - a check never ends a training: its error is logged
            raised = f"{type(error).__name__}: {first_line(error)}"
            logger.warning("the step was not checked, because %s (%s)", raised, line_of(error))
            return
        gc.collect()  # a trace refers to itself, and holds values
        tell(report)

    called = outermost if outermost is not None and is_compiled_module(outermost) else model
    handle = called.register_forward_pre_hook(hook, with_kwargs=True)


def is_assumed(finding: Finding, trace: Trace) -> bool:
    """Return True if a finding rests on contracts that were not measured on the device."""
    broken = [call for call in trace.breaches() if call.module in finding.places and call.op == finding.op]
    return any(call.breach is not None and call.breach.assumed for call in broken)
