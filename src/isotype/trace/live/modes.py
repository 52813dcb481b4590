"""Modes put under those of a running script, and taken away again, whatever the script has entered or left since.

A mode's own `with` leaves by popping the top of a stack. A script may have entered a mode before ours and leave it
before ours, so ours goes to the bottom of the script's modes and is taken out from wherever it then is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from isotype.compat.torch import (
    DISPATCH_MODES,
    FUNCTION_MODES,
    ModeStack,
    TorchDispatchMode,
    stack_of,
    stays_at_the_bottom,
)


def put_under(*modes: TorchFunctionMode | TorchDispatchMode) -> None:
    """Enter modes below every mode that the script has entered."""
    for mode in modes:
        stack = stack_of(mode)
        above = _pop_all(stack)
        stack.push(mode)
        _push_all(stack, above)


def take_out(*modes: TorchFunctionMode | TorchDispatchMode) -> None:
    """Leave modes that `put_under` entered; the script's own stay as they are. One that has gone is no error."""
    for mode in modes:
        stack = stack_of(mode)
        _push_all(stack, [other for other in _pop_all(stack) if other is not mode])


@contextmanager
def no_modes() -> Iterator[None]:
    """Within it no mode of the script is on."""
    kept = [(stack, _pop_all(stack)) for stack in (FUNCTION_MODES, DISPATCH_MODES)]
    try:
        yield
    finally:
        for stack, modes in kept:
            _push_all(stack, modes)


def _pop_all(stack: ModeStack) -> list[Any]:
    """The script's modes, top first, taken off; those of torch itself stay."""
    popped = []
    while stack.length() and not stays_at_the_bottom(stack.at(stack.length() - 1)):
        popped.append(stack.pop())
    return popped


def _push_all(stack: ModeStack, modes: list[Any]) -> None:
    for mode in reversed(modes):
        stack.push(mode)
