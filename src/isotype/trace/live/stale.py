"""Detection of autocast's cached casts from before an optimizer step that are used after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules


class StaleCasts:
    """Checks whether an optimizer step ends in the same autocast region in which the next forward begins.

    autocast casts a weight once and caches the cast until its outermost region ends. After a step inside that
    region the next forward uses the old weights. This is tested with a separate weight: it is cast, changed,
    and cast again. `found` is called once when a forward uses stale casts.
    """

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found
        self._handle: Any = None

    def stepped(self, device: str) -> None:
        """Handle the end of an optimizer step on this kind of device."""
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
        """Remove all hooks."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _product(weight: nn.Parameter) -> torch.Tensor:
    with torch.enable_grad():
        return weight @ torch.ones(1, 1, device=weight.device)
