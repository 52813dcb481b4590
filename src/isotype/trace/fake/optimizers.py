"""The optimizer of a step, on the twin's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import FakeTensorMode
from isotype.trace.fake.twin import fake_like
from isotype.trace.optimizers import OPTIMIZERS


def make_optimizer(asked: Any, parameters: Sequence[torch.Tensor], learning_rate: float | None) -> Any:
    """An optimizer over `parameters`, or a note (a string) where its step cannot be traced on fake tensors.

    Args:
        asked: a name, an optimizer (its class and defaults are taken), or a callable (parameters -> optimizer).
        parameters: the twin's trainable parameters.
        learning_rate: None for the optimizer's own default.
    """
    given = {} if learning_rate is None else {"lr": learning_rate}
    if isinstance(asked, torch.optim.Optimizer):
        closure = inspect.signature(type(asked).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            return (
                f"the step of optimizer {type(asked).__name__} is not traced: it computes the loss by itself"
            )
        known = inspect.signature(type(asked).__init__).parameters
        return type(asked)(parameters, **{k: v for k, v in asked.defaults.items() if k in known})
    if callable(asked):
        return asked(parameters)
    make = OPTIMIZERS.get(asked)
    if make is None:
        return f"the step of optimizer {asked} is not traced: it runs in kernels of its own"
    return make(parameters, **given)


def kept_states(asked: Any, model: nn.Module, mode: FakeTensorMode) -> dict[str, dict[str, Any]]:
    """Fakes of the state that an optimizer already keeps for parameters of `model`, by the parameters' names.

    A model that is cast after its first step leaves the moments in the dtype that they were made in.
    """
    if not isinstance(asked, torch.optim.Optimizer):
        return {}
    return {
        name: {
            key: fake_like(value, mode) if isinstance(value, torch.Tensor) else value
            for key, value in asked.state[parameter].items()
        }
        for name, parameter in model.named_parameters()
        if parameter in asked.state
    }
