"""A forward of a running script: its inputs by name, and whether it may train."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules


def trains(module: nn.Module) -> bool:
    """Return whether a forward of `module` may start a training step."""
    if not torch.is_grad_enabled():
        return False
    return any(p.requires_grad and not p.is_meta for p in module.parameters())


def named_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return a forward's inputs by argument name, so that `module(**inputs)` is the same call; None if that is impossible."""
    if not args:
        return dict(kwargs)
    try:
        signature = inspect.signature(module.forward)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            return None
        else:
            named[name] = value
    return named


def enumerate_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return a forward's inputs with a name for each: `argument 0` for a positional argument."""
    return [*((f"argument {number}", value) for number, value in enumerate(args)), *kwargs.items()]


class StaleCasts:
    """Detects an optimizer step inside of the autocast region in which the next forward runs.

    Autocast casts a weight once and caches the cast until the outermost autocast region ends. A forward after an
    optimizer step inside of that region uses the old weights. The first such forward calls `report`. The test uses a
    separate weight, which is cast, changed, and cast again.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self._handle: Any = None

    def stepped(self, device: str) -> None:
        """Prepare the test of the next forward, after an optimizer step on this device type."""
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
                    self._report()

        self._handle = modules.register_module_forward_pre_hook(called)

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _product(weight: nn.Parameter) -> torch.Tensor:
    with torch.enable_grad():
        return weight @ torch.ones(1, 1, device=weight.device)
