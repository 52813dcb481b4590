"""Dtype errors outside of watched steps: the line that raised the error, the tensors in the variables there, and advice."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from isotype.core.dtypes import dtype_name
from isotype.core.names import short
from isotype.core.optimizers import parameters_of
from isotype.core.source import line_of, tensors_at_hand
from isotype.records.trace import FLOATS, NO_GRADIENT, NOTHING_UNSCALED, Trace
from isotype.report.text import short_source
from isotype.rules.kit.words import and_others

_SHOWN = 6


@dataclass(frozen=True)
class Outside:
    """The description of a dtype error.

    Attributes:
        source: `file:line` of the code that raised the error, in the script or a library.
        tensors: variable, dtype, shape, and name in the model (or "") of each float tensor in a variable of this code.
        help: advice, or "".
    """

    source: str
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], str], ...]
    help: str

    def lines(self) -> Iterator[str]:
        if self.tensors or self.help:
            yield f"  --> {short_source(self.source)}"
        for name, dtype, shape, in_model in self.tensors:
            yield f"   |   {name}  {dtype_name(dtype)}  {list(shape)}   {in_model}".rstrip()
        if self.help:
            yield f"   = help   {self.help}"


def outside(error: BaseException, model: nn.Module, step: Trace) -> Outside:
    """Describe an error that was raised outside of `step`, a training step of `model` that ran without errors."""
    held = (*model.named_parameters(), *model.named_buffers())
    names = {id(tensor): name for name, tensor in held}
    source, variables = line_of(error), dict(tensors_at_hand(error))
    if gradientless := _without_gradients(error, names):
        return Outside(source, (), gradientless)
    states = dict(_of_optimizer(error))
    floats = ((n, t) for n, t in (states or variables).items() if t.dtype in FLOATS and t.dim())
    tensors = tuple((n, t.dtype, tuple(t.shape), names.get(id(t), "")) for n, t in floats)
    autocast = max((call.autocast for call in step.calls if call.autocast), key=str, default=None)
    dtypes = {dtype for _, dtype, *_ in tensors}
    return Outside(source, tensors[:_SHOWN], _help(error, short(source), bool(states), dtypes, autocast))


def _help(
    error: BaseException, at: str, optimizes: bool, dtypes: set[torch.dtype], autocast: torch.dtype | None
) -> str:
    if "ScalarType BFloat16" in str(error):
        return f"NumPy has no bfloat16: write .float() before .numpy() at {at}"
    if optimizes:
        return "make the optimizer after the model has its final dtypes, or load its state again"
    if autocast is not None and any(isinstance(owner, nn.Module) for owner in _owners(error)):
        return (
            f"the training step runs under autocast to {dtype_name(autocast)}, and this code does not: run it under "
            "torch.autocast, too, or call isotype.enforce(model, policy)"
        )
    return f"cast the tensors to one dtype at {at}" if len(dtypes) > 1 else ""


def _without_gradients(error: BaseException, names: Mapping[int, str]) -> str:
    """Return advice for an error about missing gradients; "" for other errors."""
    how = "compute the loss outside of torch.no_grad(), and not from detached values"
    if NO_GRADIENT in str(error):
        return how
    if NOTHING_UNSCALED not in str(error):
        return ""
    held = [parameter for optimizer in stepped_at(error) for parameter in parameters_of(optimizer)]
    named = and_others(names.get(id(parameter), f"{list(parameter.shape)}") for parameter in held)
    return f"no parameter of this optimizer ({named}) has a gradient: {how}, or leave this step out"


def stepped_at(error: BaseException) -> list[torch.optim.Optimizer]:
    """Return a list with the optimizer from the innermost traceback frame that has one in a variable; [] if none has."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    variables = (value for frame in frames for value in frame.f_locals.values())
    return [value for value in variables if isinstance(value, torch.optim.Optimizer)][-1:]


def _owners(error: BaseException) -> Iterator[object]:
    """Yield the value of `self` of every traceback frame that has a variable `self`; the innermost frame comes last."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]


def _of_optimizer(error: BaseException) -> Iterator[tuple[str, torch.Tensor]]:
    """If an optimizer raised the error, yield the parameter, gradient and state whose dtypes differ."""
    optimizers = (owner for owner in _owners(error) if isinstance(owner, torch.optim.Optimizer))
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            state = {"grad": parameter.grad, **optimizer.state.get(parameter, {})}
            tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
            if any(tensor.dtype != parameter.dtype for tensor in tensors.values()):
                yield "parameter", parameter
                yield from tensors.items()
                return
