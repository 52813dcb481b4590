"""Names of the tensors that a step is given: by the arguments of the model's forward, or by the loss's own variables."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import ORIGINAL

_DEPTH = 4
_LONG = 256
# Modules that pass on what they are given hold the one that names it so.
_WRAPPED = (ORIGINAL, "module", "base_model", "model")


def named_tensors(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in `value` as Python would write them: `batch['x']`, `masks[0]`, `batch.x`, `teacher.head.weight`."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if isinstance(value, nn.Module):
        yield from value.named_parameters(name)
        yield from value.named_buffers(name)
        return
    if depth == 0 or isinstance(value, (type, types.ModuleType)):
        return
    if isinstance(value, Mapping):
        parts = [(f"{name}[{key!r}]", held) for key, held in value.items()] if len(value) <= _LONG else []
    elif isinstance(value, (list, tuple)):
        parts = [(f"{name}[{index}]", held) for index, held in enumerate(value[:_LONG])]
    else:
        parts = [(f"{name}.{key}", held) for key, held in _attributes(value)]
    for part, held in parts:
        yield from named_tensors(held, part, depth - 1)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds by name, in its dict and in slots."""
    if hasattr(value, "__dict__"):
        yield from list(vars(value).items())[:_LONG]
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            member = vars(kind).get(slot)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield slot, member.__get__(value)
                except AttributeError:
                    continue  # nothing has been assigned so far


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that `module` is called with, by the names that its forward has for them."""
    names = _positional(module)
    for index, value in enumerate(args):
        yield from named_tensors(value, names[index] if index < len(names) else f"args[{index}]")
    for name, value in kwargs.items():
        yield from named_tensors(value, name)


def _positional(module: nn.Module) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()  # a forward that is not written in Python
    names = tuple(
        each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    )
    passes_on = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    held = (getattr(module, name, None) for name in _WRAPPED) if passes_on and not names else ()
    # A model of transformers without a base model is its own.
    inner = next((each for each in held if isinstance(each, nn.Module) and each is not module), None)
    return names if inner is None else _positional(inner)


def brought_by(loss: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a loss has at hand: what it closes over, its defaults, the globals that it names."""
    while isinstance(loss, functools.partial):
        yield from named_tensors(loss.args, "args")
        for name, value in loss.keywords.items():
            yield from named_tensors(value, name)
        loss = loss.func
    if isinstance(loss, types.MethodType):
        yield from named_tensors(loss.__self__, "self")
        loss = loss.__func__
    if not isinstance(loss, types.FunctionType):
        if isinstance(loss, Callable) and not isinstance(loss, nn.Module):  # type: ignore[arg-type]
            yield from named_tensors(loss, "self")
        return
    for name, cell in zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True):
        try:
            yield from named_tensors(cell.cell_contents, name)
        except ValueError:
            continue  # nothing has been assigned so far
    signature = inspect.signature(loss).parameters.values()
    for each in signature:
        yield from named_tensors(each.default, each.name)
    for name in loss.__code__.co_names:
        yield from named_tensors(loss.__globals__.get(name), name)
