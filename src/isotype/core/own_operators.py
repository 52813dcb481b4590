"""Compiled functions registered as torch operators, so that traces and profilers see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from isotype.compat.torch import dispatch_depth, is_profiled

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_LIBRARY: Any = torch.library.Library("isotype", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(
    schema: str, keys: Sequence[str] = ("CPU",), fake: Callable[..., Any] | None = None
) -> Callable[[Callable[_Given, _Made]], Callable[_Given, _Made]]:
    """Register a function as operator `isotype::…` without derivatives; `fake` is its implementation for fake
    tensors.

    Outside of dispatch modes the function is called directly: dispatch takes longer than some kernels.
    """

    def defined(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        for key in keys:
            _LIBRARY.impl(name, function, key)
        if fake is not None:
            torch.library.register_fake(f"isotype::{name}", fake, lib=_LIBRARY)
        watched: Any = getattr(torch.ops.isotype, name).default

        @wraps(function)
        def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
            seen = dispatch_depth() or is_profiled()
            result: _Made = (watched if seen else function)(*args, **kwargs)
            return result

        return called

    return defined
