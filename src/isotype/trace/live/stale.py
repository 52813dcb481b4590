"""Casts that autocast keeps: whether those of before an optimizer step are used after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules


class StaleCasts:
    """Watches whether the region of autocast that an optimizer step ends in is the one that the next forward begins in.

    autocast casts a weight once and keeps the cast until its outermost region ends. After a step inside of that region the next
    forward computes with the weights of before it. A weight of our own shows it: it is cast, written, and cast again.

    Args:
        found: called once, when a forward has begun that uses casts of before the step.
    """

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found
        self._handle: Any = None

    def stepped(self, device: str) -> None:
        """An optimizer step of weights on this kind of device has ended."""
        self.detach()
        if not (torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()):
            return
        weight = nn.Parameter(torch.ones(1, 1, device=device))
        _product(weight)
        with torch.no_grad():
            weight.fill_(2.0)

        def called(module: nn.Module, _: Any) -> None:
            if not torch.compiler.is_compiling():
                self.detach()
                if torch.is_autocast_enabled(device) and float(_product(weight).detach()) == 1.0:
                    self._found()

        self._handle = modules.register_module_forward_pre_hook(called)

    def detach(self) -> None:
        """Take everything away."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _product(weight: nn.Parameter) -> torch.Tensor:
    with torch.enable_grad():
        return weight @ torch.ones(1, 1, device=weight.device)
