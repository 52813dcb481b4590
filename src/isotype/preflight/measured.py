"""The value ranges of a float16 step that nobody has measured: measured with the step's own inputs, where that is cheap."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from isotype.compat.torch import FakeTensor, is_traceable_wrapper_subclass
from isotype.core.errors import first_line
from isotype.precision.ranges import Ranges
from isotype.ranges.batches import given_batches
from isotype.ranges.measure import measure
from isotype.ranges.measured import of_module
from isotype.records.request import StepRequest, named_inputs
from isotype.records.trace import Trace
from isotype.rules.kit.value_ranges import computes_float16
from isotype.trace.fake.surroundings import surroundings

logger = logging.getLogger("isotype")

SECONDS = 20.0
"""That a measurement may be expected to take: longer ones are left to `isotype.measure_ranges`."""

_FLOPS = {"cpu": 3e10, "cuda": 3e12}
"""Float32 FLOPs a second of a small machine of each kind: two cores with AVX2, a T4."""
_WEIGHTS = 2e8
"""Weights that are made float32 in a second."""
_AGAIN = 4 / 3
"""A measurement computes each block's forward a second time in the backward."""


def measured(request: StepRequest, trace: Trace) -> tuple[Ranges | None, tuple[str, ...]]:
    """The measurement, None where there is nothing to measure or it is not done, and why it is not.

    Args:
        request: the step.
        trace: of the step.
    """
    model, inputs = request.model, named_inputs(request.inputs)
    if not _wanted(model, inputs, trace):
        return None, ()
    seconds = _seconds(model, trace)
    if seconds > SECONDS:
        return None, (f"value ranges: to measure them here would take about {seconds:.0f} s",)
    logger.info("measuring value ranges, for about %.0f s at most", seconds)
    try:
        with surroundings():
            return measure(of_module(model), given_batches(dict(inputs))), ()
    except Exception as error:  # noqa: BLE001 - a check never ends a script: its report says what was not measured
        raised = f"{type(error).__name__}: {first_line(error)}"
        return None, (f"value ranges: the model could not be measured on these inputs, because of {raised}",)


def _wanted(model: nn.Module, inputs: Mapping[str, object], trace: Trace) -> bool:
    """Whether the step has float16 in it and was traced, and weights and inputs have values."""
    if trace.failure is not None or not computes_float16(trace):
        return False
    named = bool(inputs) and all(name.isidentifier() for name in inputs)
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    return named and all(map(_has_values, (*model.parameters(), *tensors)))


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether its values are here, whole: not on the meta device, not faked, not sharded."""
    here = not tensor.is_meta and tensor.numel() > 0 and not isinstance(tensor, FakeTensor)
    return here and not is_traceable_wrapper_subclass(tensor)


def _seconds(model: nn.Module, trace: Trace) -> float:
    devices = {parameter.device.type for parameter in model.parameters()}
    rate = min((_FLOPS.get(device, _FLOPS["cpu"]) for device in devices), default=_FLOPS["cpu"])
    weights = sum(parameter.numel() for parameter in model.parameters())
    return _AGAIN * sum(trace.flops.values()) / rate + 2 * weights / _WEIGHTS
