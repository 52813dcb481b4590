"""Inputs of a running script's forward, and whether it trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from isotype.compat.torch import current_node


def in_backward() -> bool:
    return current_node() is not None


def trains(module: nn.Module) -> bool:
    """Return whether a forward of `module` may start a training step."""
    if not torch.is_grad_enabled():
        return False
    return any(p.requires_grad and not p.is_meta for p in module.parameters())


def kwargs_of(frame: Any) -> Mapping[str, Any]:
    """Return the keyword arguments of a module's call, which global hooks do not get."""
    kwargs: Mapping[str, Any] = frame.f_locals.get("kwargs", {})
    return kwargs


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module is a model; transforms and metrics are modules too."""
    return any(not p.is_meta for p in module.parameters())


def named_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return a forward's inputs by argument name, so that `module(**inputs)` is the same call; else None."""
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
    """Return inputs of unknown names by position."""
    return [*((f"argument {number}", value) for number, value in enumerate(args)), *kwargs.items()]


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
