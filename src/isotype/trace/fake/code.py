"""The code of a step: the model, its inputs or loss, the optimizer, generation."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from isotype.compat.bitsandbytes import nothing_repacked
from isotype.compat.compiler import uncompiled
from isotype.compat.torch import ORIGINAL, fake_errors_unlogged
from isotype.compat.transformers import fakes_taken_for_real
from isotype.core.random_states import random_states_kept
from isotype.model.loss import loss_of
from isotype.records.memory import MemoryKind
from isotype.records.request import LossOf, named_inputs
from isotype.records.trace import Weight
from isotype.trace.fake.untouched import Untouched, beside_twin

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


def loss_function(inputs: Any) -> LossFunction:
    """Return (model, inputs) -> loss for the inputs of a step."""
    if isinstance(inputs, LossOf):
        return inputs.function
    if callable(inputs):
        return lambda model, _: cast("torch.Tensor", inputs(model))
    return lambda model, inputs: loss_of(model(**inputs))


@dataclass(frozen=True, eq=False)
class StepCode:
    """The code that runs in a step.

    Attributes:
        model: any module, real or on the meta device; it is not changed.
        inputs: keyword arguments of the model, a callable model -> loss, or a `LossOf`.
        optimizer: an optimizer, its class or a callable (parameters -> optimizer); None for the setup's.
        generate: code of the phase `generate`; None for one forward without labels and gradients.
        folded: trace equal layers once, see `isotype.model.fold`.
        weights: `weights_of(model)` if known: reading all values takes a while.
        evaluation: inputs of the phase `evaluate`; None for no evaluation.
        reference: whether a frozen copy of the model's weights is in memory.
    """

    model: nn.Module
    inputs: Any
    optimizer: Any = None
    generate: Callable[[nn.Module], Any] | None = None
    folded: bool = False
    weights: Sequence[Weight] | None = None
    evaluation: Any = None
    reference: MemoryKind | None = None

    @property
    def named_inputs(self) -> Mapping[str, Any]:
        """The inputs faked with the model, by name; none if a callable has its own."""
        return named_inputs(self.inputs)

    @property
    def loss(self) -> Any:
        """The loss function; the inputs if that is the model."""
        return self.inputs.function if isinstance(self.inputs, LossOf) else self.inputs

    @property
    def loss_function(self) -> LossFunction:
        """(model, inputs) -> loss."""
        return loss_function(self.inputs)

    def reached(self) -> Untouched:
        """Return the saved state that this code reaches outside of the twin."""
        return Untouched(
            [
                ("the loss", self.loss),
                ("the inputs", self.inputs.inputs if isinstance(self.inputs, LossOf) else None),
                ("generate", self.generate),
                ("the evaluation", self.evaluation),
                ("the optimizer", self.optimizer),
                *beside_twin(self.model),
            ]
        )


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Isolate the step: random states, no compilation, no inherited gradient mode or autocast."""
    with (
        fake_errors_unlogged(),
        random_states_kept(),
        torch.enable_grad(),
        _no_autocast(),
        uncompiled(),
        fakes_taken_for_real(),
        nothing_repacked(),
        torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Disable autocast as the outermost region: leaving a nested one would not clear its cached casts.

    In the real step autocast ends with the forward, and its cached casts of weights with it: a recomputation
    in the backward makes them again in its current dtype, and they take no memory there.
    """
    before, depth = torch.is_autocast_enabled("cpu"), torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()


_DEPTH = 4
_LONG = 256
# Attributes of wrapper modules with the wrapped module, whose forward has the names.
_WRAPPED = (ORIGINAL, "module", "base_model", "model")


def named_tensors(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in `value` with Python expressions: `batch['x']`, `masks[0]`, `teacher.head.weight`."""
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
    """Yield the attributes of an object, in its dict and slots."""
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
    """Yield the tensors in a call of `module`, by the argument names of its forward."""
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
    # A transformers model without a base model is its own.
    inner = next((each for each in held if isinstance(each, nn.Module) and each is not module), None)
    return names if inner is None else _positional(inner)


def brought_by(loss: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a loss: its closure, defaults and used globals."""
    for name, value in _named_by(loss):
        yield from named_tensors(value, name)


def switches_of(loss: Any) -> list[Any]:
    """Return the objects that a loss names and that hold only flags and numbers, such as `net.active`.

    The loss may set what a module of the model reads: a copy of such an object would not be set.
    """
    return [value for _, value in _named_by(loss) if _is_switch(value)]


def _is_switch(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, nn.Module, type, types.ModuleType, *_CODE)):
        return False
    held = getattr(value, "__dict__", None)
    return type(held) is dict and all(
        isinstance(each, (bool, int, float, str, type(None))) for each in held.values()
    )


_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def _named_by(loss: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function names: arguments of partials, `self`, closure, defaults, used globals."""
    while isinstance(loss, functools.partial):
        yield "args", loss.args
        yield from loss.keywords.items()
        loss = loss.func
    if isinstance(loss, types.MethodType):
        yield "self", loss.__self__
        loss = loss.__func__
    if not isinstance(loss, types.FunctionType):
        if isinstance(loss, Callable) and not isinstance(loss, nn.Module):  # type: ignore[arg-type]
            yield "self", loss
        return
    for name, cell in zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # nothing has been assigned so far
    for each in inspect.signature(loss).parameters.values():
        yield each.name, each.default
    for name in loss.__code__.co_names:
        yield name, loss.__globals__.get(name)
