"""The measured model: a copy that shares the weights of the original model, and converts a weight when the weight is used."""

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from isotype.compat.accelerate import FORWARD_BEFORE, HOOK
from isotype.compat.bitsandbytes import dequantize_4bit
from isotype.compat.torch import COMPILED_CALL, COMPILER, ORIGINAL, PARAMETERS, own_buffers, own_parameters
from isotype.core.dtypes import HALVES
from isotype.core.names import base_name
from isotype.model.boundary import set_boundary
from isotype.model.quantized import dense_weight, quantization_state, row_scales
from isotype.model.walk import empty_copies, fill_copies, kind_of, lists_of_blocks
from isotype.ranges.weights import OnDemand, Weight, Weights

_WRAPPED = (ORIGINAL, "module")
_QUANTIZED = ("linear4bit", "linear8bit")

Read = Callable[[nn.Module, str, torch.Tensor], Weight]
"""A function (module, name of a parameter in the module, parameter) -> weight."""


class Watcher(Protocol):
    """A recorder that adds hooks to the modules of a copy, as `RangeRecorder` does."""

    def again(self) -> AbstractContextManager[Any]:
        """Return the context for the forward of a block, and for its recomputation."""

    def watch(self, model: nn.Module, names: Mapping[int, str], inside: Collection[int]) -> None: ...


@dataclass(frozen=True)
class Twin:
    """The copy of a model for a measurement. `names`: module's id -> plain name; `blocks`: lists of names of blocks."""

    model: nn.Module
    names: dict[int, str]
    blocks: tuple[tuple[str, ...], ...]
    weights: Weights

    def weight_ranges(self) -> dict[str, tuple[float, float, float]]:
        """Return `Weights.range_of` of every module with parameters, by plain name."""
        # A forward may replace modules, as BigBird's does for texts that are shorter than its blocks.
        modules = (module for module in self.model.modules() if id(module) in self.names)
        weights = ((self.names[id(module)], _weights_in(module)) for module in modules)
        return {name: self.weights.range_of(some) for name, some in weights if some}


def _weights_in(module: nn.Module) -> list[Weight]:
    parameters = vars(module).get(PARAMETERS)
    return parameters.weights() if isinstance(parameters, OnDemand) else []


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and `torch.compile` wrappers."""
    while type(model).__module__.startswith(("torch.nn.parallel", COMPILER)):
        model = next(getattr(model, name) for name in _WRAPPED if hasattr(model, name))
    return model


def twin_of(
    model: nn.Module, weights: Weights, recorder: Watcher, done: Callable[[], None], read: Read | None = None
) -> Twin:
    """Return a copy of `model` for a measurement, in evaluation mode and without the casts of a policy.

    `done` is called after each run of a block. `read` reads the values of a parameter.
    """
    memo, dense = _Memo(model, weights), set[int]()
    for module in model.modules():
        parameters = own_parameters(module)
        reader = read or _live
        on_demand = {n: None if p is None else reader(module, n, p) for n, p in parameters.items()}
        memo[id(parameters)] = OnDemand(weights, on_demand)
        if kind_of(module) in _QUANTIZED:
            memo[id(module)] = _dense(module, memo)
            dense.add(id(module))
    empty_copies(model, memo)
    fill_copies(model, memo, leave=dense)
    twin: nn.Module = memo[id(model)]
    names = {id(module): base_name(name) for name, module in twin.named_modules()}
    for module in twin.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            _tidy(module, weights.dtype)
    blocks, inside = [], set[int]()
    for _, layers in lists_of_blocks(twin, fewest=1):
        if id(layers) in inside:
            continue  # a list inside a block
        blocks.append(tuple(names[id(block)] for block in layers.children()))
        for block in layers.children():
            inside |= {id(module) for module in block.modules()}
            vars(block)["forward"] = _checkpointed(block.forward, weights, recorder, done)
    recorder.watch(twin, names, inside)
    for module in twin.modules():
        if _weights_in(module):
            _keep_while_it_runs(module, weights, id(module) in inside)
    return Twin(twin, names, tuple(blocks), weights)


class _Memo(dict[int, Any]):
    """A memo for `deepcopy` that casts parameters in plain attributes, such as the flat weights of recurrent layers."""

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        super().__init__()
        self._parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._weights = weights

    def get(self, key: int, default: Any = None) -> Any:
        if key not in self and key in self._parameters:
            self[key] = self._parameters[key].detach().to(self._weights.device, self._weights.dtype)
        return super().get(key, default)


def _live(module: nn.Module, name: str, parameter: torch.Tensor) -> Weight:
    kind = kind_of(module) if name == "weight" else ""
    four = kind == "linear4bit"
    state: Any = quantization_state(module) if four else getattr(parameter, "quant_state", None)
    values: Callable[[], torch.Tensor] = parameter.detach
    if state is not None:
        values = functools.partial(dequantize_4bit, parameter.detach(), state)
    elif kind == "linear8bit" and row_scales(module) is not None:
        values = functools.partial(dense_weight, module)
    shape = parameter.shape if state is None else torch.Size(state.shape)
    return Weight(id(parameter), shape, values, parameter.requires_grad)


def _dense(layer: Any, memo: dict[int, Any]) -> nn.Module:
    with torch.device("meta"):
        dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    vars(dense)[PARAMETERS] = memo[id(layer._parameters)]
    return dense


def _tidy(module: nn.Module, dtype: torch.dtype) -> None:
    """Undo what a training has set: the casts of the policy, accelerate's hooks, compilation, checkpointing, caches."""
    set_boundary(module, None)
    attributes = vars(module)
    if HOOK in attributes:
        attributes.pop(HOOK)
        attributes.pop("forward", None)
        if FORWARD_BEFORE in attributes:
            attributes["forward"] = attributes.pop(FORWARD_BEFORE)
    attributes.pop(COMPILED_CALL, None)
    attributes["training"] = False
    if attributes.get("gradient_checkpointing"):
        attributes["gradient_checkpointing"] = False
    config: Any = attributes.get("config")
    if getattr(config, "use_cache", None):
        config.use_cache = False  # a recomputed block would fill the cache twice
    for holder in (attributes, own_buffers(module)):
        for name, value in list(holder.items()):
            if isinstance(value, torch.Tensor) and value.dtype in HALVES:
                holder[name] = value.to(dtype)


def _checkpointed(
    forward: Callable[..., Any], weights: Weights, recorder: Watcher, done: Callable[[], None]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        weights.open()
        try:
            with recorder.again():
                result = forward(*args, **kwargs)
        finally:
            weights.close()
        done()
        return result

    def block(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return block


def _keep_while_it_runs(module: nn.Module, weights: Weights, inside: bool) -> None:
    """While a module outside of blocks runs, keep the weights of the module. An embedding keeps only the looked-up rows."""
    looks_up = kind_of(module) == "embedding"

    def enter(*_: Any) -> None:
        weights.embedding = looks_up
        if not inside:
            weights.open()

    def leave(*_: Any) -> None:
        weights.embedding = False
        if not inside:
            weights.close()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
