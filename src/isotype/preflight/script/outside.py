"""Dtype errors outside of watched steps: the line, the tensors available there, and advice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from isotype.core.dtypes import dtype_name
from isotype.core.names import short
from isotype.core.source import line_of, tensors_at_hand
from isotype.records.trace import FLOATS, Trace

_SHOWN = 6


@dataclass(frozen=True)
class Outside:
    """A dtype error.

    Attributes:
        source: `file:line` of the script's or a library's code.
        tensors: (variable name, dtype, shape, name in the model or "") of the float tensors there.
        help: advice; "" if there is none.
    """

    source: str
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], str], ...]
    help: str


def outside(error: BaseException, models: Iterable[nn.Module], step: Trace) -> Outside:
    """Return the description of `error`, beside a training step of `models` that has no error."""
    names = {
        id(tensor): name
        for model in models
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    source, at_hand = line_of(error), dict(tensors_at_hand(error))
    states = dict(_of_optimizer(error, names))
    seen = tuple(
        (name, tensor.dtype, tuple(tensor.shape), names.get(id(tensor), ""))
        for name, tensor in (states or at_hand).items()
        if tensor.dtype in FLOATS and tensor.dim()
    )
    autocast = max((call.autocast for call in step.calls if call.autocast), key=str, default=None)
    return Outside(source, seen[:_SHOWN], _help(error, source, bool(states), seen, autocast))


def _help(
    error: BaseException,
    source: str,
    optimizes: bool,
    seen: Iterable[tuple[str, torch.dtype, tuple[int, ...], str]],
    autocast: torch.dtype | None,
) -> str:
    at = short(source)
    if "ScalarType BFloat16" in str(error):
        return f"NumPy has no bfloat16: write .float() before .numpy() at {at}"
    if optimizes:
        return "make the optimizer after the model has its final dtypes, or load its state again"
    dtypes = {dtype for _, dtype, *_ in seen}
    if autocast is not None and any(isinstance(each.get("self"), nn.Module) for each in _variables(error)):
        return (
            f"the training step runs under autocast to {dtype_name(autocast)}, and this does not: run it under "
            "torch.autocast, too, or call isotype.enforce(model, policy)"
        )
    return f"cast them to one dtype at {at}" if len(dtypes) > 1 else ""


def _variables(error: BaseException) -> Iterator[Mapping[str, object]]:
    """Yield the variables of each frame of an error's traceback, the innermost last."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame.f_locals
        step = step.tb_next


def _of_optimizer(error: BaseException, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the first parameter with a gradient or state of another dtype, if an optimizer's step raised."""
    optimizers = (each.get("self") for each in _variables(error))
    for optimizer in (each for each in optimizers if isinstance(each, torch.optim.Optimizer)):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = {"grad": parameter.grad, **optimizer.state.get(parameter, {})}
                kept = {
                    name: value
                    for name, value in state.items()
                    if isinstance(value, torch.Tensor) and value.dim()
                }
                if any(value.dtype != parameter.dtype for value in kept.values()):
                    yield "parameter", parameter
                    yield from kept.items()
                    return
