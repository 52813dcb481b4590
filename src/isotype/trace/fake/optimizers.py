"""Optimizers by the names that trainers give them, on the twin's parameters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from isotype.core.errors import Problem
from isotype.trace.fake.twin import fake_like

_Make = Callable[..., torch.optim.Optimizer]


def _with(cls: Any, **options: Any) -> _Make:
    def make(parameters: Sequence[torch.Tensor], **given: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = cls(parameters, **{**options, **given})
        return made

    return make


OPTIMIZERS: dict[str, _Make] = {
    "adamw": _with(torch.optim.AdamW),
    "adamw_torch": _with(torch.optim.AdamW),
    "adamw_foreach": _with(torch.optim.AdamW, foreach=True),
    "adamw_fused": _with(torch.optim.AdamW, fused=True),
    "adamw_torch_fused": _with(torch.optim.AdamW, fused=True),
    "adam": _with(torch.optim.Adam),
    "sgd": _with(torch.optim.SGD),
    "adafactor": _with(torch.optim.Adafactor),
    "adagrad": _with(torch.optim.Adagrad),
    "rmsprop": _with(torch.optim.RMSprop),
}
"""Name -> what makes the optimizer from parameters and `lr`."""

# bitsandbytes' optimizers update in kernels of their own, which take every float dtype.
_OWN_KERNELS = (
    "8bit",
    "bnb",
    "paged",
    "lion",
    "galore",
    "apollo",
    "lomo",
    "muon",
    "schedule_free",
    "stable_adamw",
)


def make_optimizer(asked: Any, parameters: Sequence[torch.Tensor], learning_rate: float | None) -> Any:
    """An optimizer over `parameters`, or a note (a string) where its step cannot be followed on fake tensors.

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


def unknown_optimizer(asked: Any) -> Iterator[Problem]:
    """The problem with a name that no trainer knows; none for other names and for what is no name."""
    if isinstance(asked, str) and asked not in OPTIMIZERS and not any(part in asked for part in _OWN_KERNELS):
        near = difflib.get_close_matches(asked, OPTIMIZERS, n=2)
        fix = f"did you mean {' or '.join(near)}?" if near else "give one of these, or a callable"
        yield Problem(f"optimizer {asked!r}", f"one of {', '.join(OPTIMIZERS)}", fix)


def learning_rate_of(optimizer: torch.optim.Optimizer) -> float:
    """The largest learning rate of an optimizer's groups: before a schedule's warm-up took it down to nothing."""
    return max(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
