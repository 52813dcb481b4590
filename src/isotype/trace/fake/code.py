"""The code that runs in a step: the model, its inputs or its loss, the optimizer, generation."""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from isotype.compat.bitsandbytes import nothing_repacked, plain_casts
from isotype.compat.compiler import uncompiled
from isotype.compat.lightning import lightning_traced
from isotype.compat.torch import ORIGINAL, fake_errors_unlogged, no_saved_tensor_hooks
from isotype.compat.transformers import fakes_taken_for_real
from isotype.core.random_states import random_states_kept
from isotype.model.loss import is_partial, loss_of
from isotype.records.request import LossOf, StepRequest
from isotype.trace.fake.state_snapshot import Untouched, beside_twin

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


def loss_function(inputs: Any) -> LossFunction:
    """Return the loss function of a step, called with (model, inputs). `StepRequest.inputs` explains `inputs`."""
    if isinstance(inputs, LossOf):
        return inputs.function
    if callable(inputs):
        return lambda model, _: cast("torch.Tensor", inputs(model))
    return LossOfOutput()


class LossOfOutput:
    """Calls a model and returns the loss in its output. `partial`: True if the real loss may use more outputs."""

    partial = False

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        output = model(**inputs)
        self.partial |= is_partial(output)
        return loss_of(output)


def loss_in(inputs: Any) -> Any:
    """Return the loss function that a request's inputs contain. If the model computes the loss, return the inputs."""
    return inputs.function if isinstance(inputs, LossOf) else inputs


def state_reached_by(request: StepRequest) -> Untouched:
    """Save the state that the code of a step can change outside of the model's copy (the twin)."""
    return Untouched(
        [
            ("the loss", loss_in(request.inputs)),
            ("the inputs", request.inputs.inputs if isinstance(request.inputs, LossOf) else None),
            ("generate", request.generate),
            ("the evaluation", request.evaluation),
            ("the optimizer", request.optimizer),
            *beside_twin(request.model),
        ]
    )


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Run the step isolated: without compilation, and without the caller's random states, autocast, gradient mode and hooks."""
    with (
        fake_errors_unlogged(),
        no_saved_tensor_hooks(),
        random_states_kept(),
        torch.enable_grad(),
        _no_autocast(),
        uncompiled(),
        fakes_taken_for_real(),
        nothing_repacked(),
        plain_casts(),
        lightning_traced(),
        torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Disable autocast, and make the step's autocast region the outermost one.

    Autocast frees its cached casts of weights at the end of the outermost region. In the real step, this region ends
    with the forward, so a recomputation in the backward casts the weights again. The trace has to cast them again, too.
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
# Attributes in which wrapper modules store the wrapped module, whose forward names the arguments.
_WRAPPED = (ORIGINAL, "module", "base_model", "model")


def named_tensors(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in `value` with their Python expressions: `batch['x']`, `masks[0]`, `teacher.head.weight`."""
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
        parts = [(f"{name}[{key!r}]", item) for key, item in value.items()] if len(value) <= _LONG else []
    elif isinstance(value, (list, tuple)):
        parts = [(f"{name}[{index}]", item) for index, item in enumerate(value[:_LONG])]
    else:
        parts = [(f"{name}.{key}", item) for key, item in _attributes(value)]
    for expression, item in parts:
        yield from named_tensors(item, expression, depth - 1)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "__dict__"):
        yield from list(vars(value).items())[:_LONG]
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            member = vars(kind).get(slot)
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # a slot without a value
                    yield slot, member.__get__(value)


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the arguments of a call of `module`, each with the argument's name."""
    names = _positional(module)
    positional = [(f"args[{at}]" if at >= len(names) else names[at], value) for at, value in enumerate(args)]
    for name, value in (*positional, *kwargs.items()):
        yield from named_tensors(value, name)


def _positional(module: nn.Module) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()  # a forward that is not written in Python
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
    passes_on = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    wrapped = (getattr(module, name, None) for name in _WRAPPED) if passes_on and not names else ()
    # The `base_model` of a transformers model without a base model is the model itself.
    inner = next((part for part in wrapped if isinstance(part, nn.Module) and part is not module), None)
    return names if inner is None else _positional(inner)


def tensors_of_loss(loss: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor that a loss function can read: in its closure, defaults and used globals."""
    for name, value in _named_by(loss):
        yield from named_tensors(value, name)


def switches_of(loss: Any) -> list[Any]:
    """Return the objects that a loss function can read, and that have only simple attributes (flags, numbers, strings).

    The loss may set a flag that the model reads, so the copy of the model must share the objects with the loss.
    """
    return [value for _, value in _named_by(loss) if _is_switch(value)]


def _is_switch(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, nn.Module, type, types.ModuleType, *_CODE)):
        return False
    attributes = getattr(value, "__dict__", None)
    simple = (bool, int, float, str, type(None))
    return type(attributes) is dict and all(isinstance(item, simple) for item in attributes.values())


_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def _named_by(loss: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function can read: arguments of partials, `self`, closure, defaults, used globals."""
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
        with contextlib.suppress(ValueError):  # a variable without a value
            yield name, cell.cell_contents
    for parameter in inspect.signature(loss).parameters.values():
        yield parameter.name, parameter.default
    for name in loss.__code__.co_names:
        yield name, loss.__globals__.get(name)
