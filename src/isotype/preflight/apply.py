"""Applies the actions of a fix to a model, or to its copy on fake tensors, and undoes them."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from isotype.compat.replaced import replace
from isotype.compat.torch import FakeTensor, own_buffers, own_modules, own_parameters, tree_map
from isotype.core.dtypes import dtype_name, parse_dtype
from isotype.core.errors import UsageError
from isotype.core.names import base_name, starred
from isotype.core.operators import tensors_of
from isotype.model.boundary import BoundarySettings, boundary_of, cast_floats, set_boundary
from isotype.model.boundary_choice import computes_float32, range_boundaries
from isotype.model.enforce import exchange, fresh_rotary
from isotype.model.experts.stack import held_stack
from isotype.model.quantized import keep_training_layout, quantization_states, restore_layout
from isotype.model.repeated_layers import stands_for
from isotype.model.walk import own_float_parameters, places, plain_tensors
from isotype.precision.policy import ModuleException, PrecisionPolicy
from isotype.records.finding import Action, RangeBoundaries

Undo = Callable[[], object]


def apply_actions(model: nn.Module, actions: Iterable[Action]) -> list[Undo]:
    """Apply actions, and return functions that undo them. If the model lacks a target, undo all actions and raise UsageError."""
    undos: list[Undo] = []
    for action in actions:
        change = _CHANGES.get(action.kind)
        if change is None:
            continue
        targets = list(_targets(model, action))
        if not targets:
            take_back(undos)
            what, fix = f"{action.kind} {action.target!r}", "call repair with the model that was checked"
            expected = f"a {'tensor' if action.kind in _TENSORS else 'module'} of {type(model).__name__}"
            raise UsageError.of("the fix does not apply to this model", what, expected, fix)
        try:
            for target in targets:
                undos += change(target, action.value)
        except Exception:
            take_back(undos)
            raise
    return undos


def take_back(undos: list[Undo]) -> None:
    """Call the functions of `undos` from last to first, and empty the list."""
    while undos:
        undos.pop()()


_TENSORS = ("parameter", "trainable", "gradient", "buffer")


def _targets(model: nn.Module, action: Action) -> Iterator[Any]:
    pattern = re.compile(re.escape(action.target).replace(r"\*", r"\d+"))
    for name, module in model.named_modules():
        parameters = {key: tensor for key, tensor in own_parameters(module).items() if tensor is not None}
        if action.kind not in _TENSORS:
            # A pattern with layer numbers may match layers without weights, which get no boundary.
            if pattern.fullmatch(name) and (action.kind != "boundary" or parameters):
                yield module
            continue
        of_buffers = action.kind == "buffer"
        buffers = [key for key, tensor in own_buffers(module).items() if tensor is not None]
        buffers += [key for key, _ in plain_tensors(module)]
        targets = {key: (module, key) for key in buffers} if of_buffers else parameters
        for key, target in targets.items():
            if pattern.fullmatch(f"{name}.{key}" if name else key):
                yield target


def _holder(module: nn.Module, name: str) -> tuple[Any, Any]:
    """Return the dictionary, list or tuple that contains the tensor `name` of `module`, and the tensor's key."""
    first, *rest = name.split(".")
    holder, key = _entry(module, first)
    for step in rest:
        holder, key = _entry(holder[key], step)
    return holder, key


def _entry(holder: Any, step: str) -> tuple[Any, Any]:
    """Return (container, key) so that `container[key]` is the item or attribute of `holder` with the name `step`."""
    if isinstance(holder, (list, tuple)):
        return holder, int(step)
    if not isinstance(holder, nn.Module):
        return holder, step
    dicts = (own_buffers(holder), own_parameters(holder), own_modules(holder), vars(holder))
    return next(entries for entries in dicts if step in entries), step


def _cast_in_place(parameter: Any, value: str) -> list[Undo]:
    """Cast a parameter's data. Cast a tensor in place: optimizers and other modules refer to the parameter, so it stays the same object."""
    dtype = parse_dtype(value)
    if parameter.dtype == dtype:
        return []
    return [exchange(parameter, "data", parameter.data.to(dtype), dtype)]


def _set_trainable(parameter: Any, value: str) -> list[Undo]:
    before = parameter.requires_grad
    parameter.requires_grad_(True)
    return [partial(parameter.requires_grad_, before)]


def _cast_buffer(target: Any, value: str) -> list[Undo]:
    module, name = target
    holder, key = _holder(module, name)
    before = holder[key]
    if isinstance(before, nn.Parameter):
        return _cast_in_place(before, value)  # a parameter of an unregistered module
    rounded = "inv_freq" in name and before.dtype in (torch.bfloat16, torch.float16)
    if rounded and not hasattr(module, "config"):
        what = f"{name} of a {type(module).__name__} in {dtype_name(before.dtype)}"
        expected = "a module with a config, from which the frequencies can be computed"
        fix = "load the model again, and do not cast its buffers"
        raise UsageError.of("a cast does not restore rounded frequencies", what, expected, fix)
    fresh = fresh_rotary(name, module) if rounded and not isinstance(before, FakeTensor) else None
    source = before if fresh is None else getattr(fresh, name).to(before.device)
    return [_put(module, name, source.to(parse_dtype(value)))]


def _put(module: nn.Module, name: str, value: Any) -> Undo:
    """Store a value in place of the tensor or tuple `name` of `module`. A tuple is replaced by a changed copy."""
    holder, key = _holder(module, name)
    if isinstance(holder, tuple):
        items = [value if position == key else item for position, item in enumerate(holder)]
        return _put(module, name.rpartition(".")[0], tuple.__new__(type(holder), items))
    undo = partial(holder.__setitem__, key, holder[key])
    holder[key] = value
    return undo


# Hooks are module-level functions, so that a model with hooks can be pickled.
def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floats(output, dtype)


def _cast_input(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast a module's inputs. If a matrix is cast, vectors and scalars (timesteps, lengths) keep their dtype."""
    leaves = [leaf for leaf in tensors_of((args, kwargs)) if leaf.is_floating_point() and leaf.dtype != dtype]
    matrices = any(leaf.dim() > 1 for leaf in leaves)

    def cast(leaf: Any) -> Any:
        kept = matrices and isinstance(leaf, torch.Tensor) and leaf.dim() < 2
        return leaf if kept else cast_floats(leaf, dtype)

    return tree_map(cast, (args, kwargs))


def _require_gradient(module: nn.Module, args: Any, output: Any) -> Any:
    """Make a module's outputs require gradients, as transformers' `enable_input_require_grads` does."""

    def requiring(leaf: Any) -> Any:
        floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.requires_grad_(True) if floats and not leaf.requires_grad else leaf

    return tree_map(requiring, output)


def _set_state(layer: Any, value: str) -> list[Undo]:
    stack = held_stack(layer)
    states = quantization_states(layer) if stack is None else [stack]
    return [replace(state, "dtype", parse_dtype(value)) for state in states]


def _set_compute(layer: Any, value: str) -> list[Undo]:
    if held_stack(layer) is not None:  # stacked experts are multiplied in the dtype of their dense values
        return _set_state(layer, value)
    return [replace(layer, "compute_dtype", parse_dtype(value)), replace(layer, "compute_type_is_set", True)]


def _set_boundary(module: nn.Module, value: str) -> list[Undo]:
    kind, _, dtype = value.partition(":")
    return _with_boundary(module, BoundarySettings(kind, parse_dtype(dtype)))


def _with_boundary(module: nn.Module, settings: BoundarySettings) -> list[Undo]:
    before = boundary_of(module)
    set_boundary(module, settings)
    return [partial(set_boundary, module, before)]


def _set_range_boundaries(model: nn.Module, value: str) -> list[Undo]:
    """Add the casts of `enforce_model` to modules whose values exceed the range of float16."""
    choice = RangeBoundaries.of(value)
    policy = PrecisionPolicy(
        parse_dtype(choice.compute),
        choice.compute,
        wide_residual=choice.wide_residual,
        exceptions=tuple(_exceptions(model, choice)),
    )
    all_places = tuple(places(model))
    by_ranges = range_boundaries(model, all_places, policy)
    undos: list[Undo] = []
    for place in all_places:
        settings = by_ranges.get(place.name)
        if settings is None:
            continue
        if computes_float32(settings):
            for parameter in own_float_parameters(place.module).values():
                undos += _cast_in_place(parameter, "float32")
        if place.kind == "linear4bit":
            undos += _set_compute(place.module, dtype_name(settings.compute))
        undos += _with_boundary(place.module, settings)
    return undos


def _exceptions(model: nn.Module, choice: RangeBoundaries) -> Iterable[ModuleException]:
    """Return the exceptions. If only one of several equal layers is traced, this layer gets the exceptions of all of them."""
    present = dict.fromkeys(base_name(name) for name, _ in model.named_modules())
    standing = tuple(f"{base_name(name)}." for name, count in stands_for(model).items() if count > 1)
    excepted = {module for module, _, _ in choice.exceptions}
    representing = [name for name in present if name.startswith(standing) and name not in excepted]
    largest: dict[str, ModuleException] = {}
    for module, how, exponent in choice.exceptions:
        like = starred(module)
        names = [module] if module in present else [n for n in representing if starred(n) == like]
        for name in names:
            if name not in largest or largest[name].exponent < exponent:
                largest[name] = ModuleException(name, cast("Any", how), exponent)
    return largest.values()


_CHANGES: dict[str, Callable[[Any, str], list[Undo]]] = {
    "parameter": _cast_in_place,
    "trainable": _set_trainable,
    "differentiable": lambda module, _: [module.register_forward_hook(_require_gradient).remove],
    "gradient": lambda weight, value: [exchange(weight, "grad_dtype", *[parse_dtype(value)] * 2)],
    "buffer": _cast_buffer,
    "output": lambda module, value: [
        module.register_forward_hook(partial(_cast_output, parse_dtype(value))).remove
    ],
    "input": lambda module, value: [
        module.register_forward_pre_hook(partial(_cast_input, parse_dtype(value)), with_kwargs=True).remove
    ],
    "state": _set_state,
    "compute": _set_compute,
    "boundary": _set_boundary,
    "ranges": _set_range_boundaries,
    "layout": lambda layer, _: [partial(restore_layout, layer, keep_training_layout(layer))],
}
