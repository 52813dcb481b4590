"""Optimizers by the names that trainers give them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from isotype.core.errors import Problem
from isotype.core.optimizers import has_own_kernels

_Make = Callable[..., torch.optim.Optimizer]


def _with(cls: Any, **options: Any) -> _Make:
    def make(parameters: Sequence[torch.Tensor], **keywords: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = cls(parameters, **{**options, **keywords})
        return optimizer

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


def unknown_optimizer(asked: Any) -> Iterator[Problem]:
    """Yield the problem with a name that no trainer knows; none for other names and for what is no name."""
    if isinstance(asked, str) and asked not in OPTIMIZERS and not has_own_kernels(asked):
        near = difflib.get_close_matches(asked, OPTIMIZERS, n=2)
        fix = f"did you mean {' or '.join(near)}?" if near else "give one of these, or a callable"
        yield Problem(f"optimizer {asked!r}", f"one of {', '.join(OPTIMIZERS)}", fix)


def learning_rate_of(optimizer: torch.optim.Optimizer) -> float:
    """The largest learning rate of an optimizer's groups: before a schedule's warm-up took it down to nothing."""
    return max(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
