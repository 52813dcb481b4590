"""Modes put under those of a running script, and taken away again, whatever the script has entered or left since.

A mode's own `with` leaves by popping the top of a stack. A script may have entered a mode before ours and leave it
before ours, so ours goes to the bottom of the script's modes and is taken out from wherever it then is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# The stacks' own primitives: `torch.overrides` and `torch.utils._python_dispatch` are built from them.
_functions = (
    torch._C._len_torch_function_stack,
    torch._C._get_function_stack_at,
    torch._C._pop_torch_function_stack,
    torch._C._push_on_torch_function_stack,
)
_dispatches = (
    torch._C._len_torch_dispatch_stack,
    torch._C._get_dispatch_stack_at,
    lambda: torch._C._pop_torch_dispatch_stack(None),
    torch._C._push_on_torch_dispatch_stack,
)


def put_under(*modes: TorchFunctionMode | TorchDispatchMode) -> None:
    """Enter modes below every mode that the script has entered."""
    for mode in modes:
        stack = _stack_of(mode)
        above = _pop_all(stack)
        stack[3](mode)
        _push_all(stack, above)


def take_out(*modes: TorchFunctionMode | TorchDispatchMode) -> None:
    """Leave modes that `put_under` entered; the script's own stay as they are. One that has gone is no error."""
    for mode in modes:
        stack = _stack_of(mode)
        _push_all(stack, [other for other in _pop_all(stack) if other is not mode])


@contextmanager
def no_modes() -> Iterator[None]:
    """Within it no mode of the script is on."""
    stacks = (_functions, _dispatches)
    kept = [(stack, _pop_all(stack)) for stack in stacks]
    try:
        yield
    finally:
        for stack, modes in kept:
            _push_all(stack, modes)


def is_simulated() -> bool:
    """Whether fake, functional or proxy tensors are being made: nothing real runs."""
    keys = torch._C._TorchDispatchModeKey
    return any(
        torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    )


def _stack_of(mode: Any) -> Any:
    return _functions if isinstance(mode, TorchFunctionMode) else _dispatches


def _pop_all(stack: Any) -> list[Any]:
    """The script's modes, top first, taken off; those of torch itself stay."""
    length, at, pop, _ = stack
    popped = []
    while length() and not _stays(at(length() - 1)):
        popped.append(pop())
    return popped


def _push_all(stack: Any, modes: list[Any]) -> None:
    for mode in reversed(modes):
        stack[3](mode)


def _stays(mode: Any) -> bool:
    """Whether nothing may lie below it: `torch.set_default_device` looks for its own mode at the bottom."""
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return mode is default or getattr(mode, "_mode_key", None) is not None
