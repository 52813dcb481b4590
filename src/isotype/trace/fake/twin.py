"""The twin of a model: the same modules on fake tensors, which have dtypes and shapes but no values.

The user's model is not changed. Its parameters and buffers, real or on the meta device, become fakes. All other
attributes of its modules are copied, so that a forward changes only the twin.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from isotype.compat.bitsandbytes import give_quantized_class, has_plain_codes
from isotype.compat.torch import (
    PARAMETERS,
    TENSOR_DATA,
    FakeTensor,
    FakeTensorMode,
    give_class,
    mark_as_parameter,
    storage_of,
    tree_map,
    without_dispatch,
    without_modes,
)
from isotype.compat.torch_fsdp import apply_like_fsdp, unshard
from isotype.model.shard import gathered_by
from isotype.model.walk import copied, empty_copies, fill_copies, kind_of
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.devices.simulated import SimulatedMode
from isotype.records.trace import OUTPUT_DTYPE, PARAM_DTYPE, Origin
from isotype.trace.recorder import ORIGIN

_CPU = torch.device("cpu")


def fake_mode(profile: DeviceProfile | None = None) -> SimulatedMode:
    """Return a mode that replaces the real tensors of an operator by fakes.

    If the profile describes a CPU, the fakes of isotype's kernels use the dtypes in which that CPU multiplies.
    """
    mode = SimulatedMode(profile)
    # The fake kernels have a cache in `isotype.trace.fake.kernels`. A second cache would only take time.
    mode.cache_enabled = False
    return mode


SPARSE = "_isotype_sparse"
"""Name of the attribute that marks the dense fake of a sparse tensor."""


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """Return a fake on the CPU with the shape, strides and dtype of a tensor on any device."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    if tensor.is_nested:
        raise NotImplementedError("nested tensors cannot be traced")
    with without_dispatch():  # ten times faster than through the mode
        if tensor.layout != torch.strided:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        else:
            memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    fake = FakeTensor(mode, memory, _CPU)
    if tensor.layout != torch.strided:
        setattr(fake, SPARSE, True)
    return fake


def fake_inputs(inputs: Any, mode: FakeTensorMode) -> Any:
    """Replace each tensor in nested inputs by a fake with the same `requires_grad`."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf_fake = fake_like(leaf, mode)
        return leaf_fake.requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else leaf_fake

    return tree_map(fake, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def twin_of(model: nn.Module, mode: FakeTensorMode, shared: Iterable[Any] = ()) -> nn.Module:
    """Return a copy of `model` on fake tensors. Classes, names, tied weights, hooks and quantization states are the same.

    The copy shares the objects in `shared`, and attributes that cannot be copied (a lock, a file, a process group).
    """
    memo: dict[int, Any] = {id(value): value for value in shared}
    empty_copies(model, memo)
    fakes = _Fakes(mode)
    tensors = [*model.named_parameters(remove_duplicate=True), *model.named_buffers(remove_duplicate=True)]
    for _, tensor in tensors:
        memo[id(tensor)] = _empty_parameter(tensor, fakes)
    with _FakeCopies(fakes):
        for _, tensor in tensors:
            _fill(memo[id(tensor)], tensor, memo)
        fill_copies(model, memo)
    twin: nn.Module = memo[id(model)]
    if whole := unshard(twin):
        _gather_in_dtypes(model, twin)
    for module in twin.modules():
        # Gathered parameters get the classes that they had before the model was sharded. bitsandbytes itself gives packed
        # codes their class again, in the forward.
        if kind_of(module) in ("linear4bit", "linear8bit") and (whole or has_plain_codes(module)):
            give_quantized_class(module)
    return twin


class _Fakes:
    """The fakes of a model's tensors. If tensors share memory (an int8 weight and its codes), their fakes share memory."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # Each tensor is kept alive: another tensor could get the address of its memory.
        self._memory: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = fake_like(tensor, self._mode)
        if fake is tensor or tensor.layout != torch.strided:
            return fake
        with without_dispatch():
            start = int(tensor.storage_offset()) * tensor.itemsize
            where = (storage_of(tensor), start, tensor.numel() * tensor.itemsize)
            _, first = self._memory.setdefault(where, (tensor, fake))
            same_size = fake.untyped_storage().nbytes() == first.untyped_storage().nbytes()
            if first is fake or not tensor.numel() or not same_size:
                return fake
            memory = torch.empty(0, dtype=tensor.dtype, device="meta")
            memory.set_(first.untyped_storage(), 0, tensor.shape, tensor.stride())
        return FakeTensor(self._mode, memory, _CPU)


def _empty_parameter(tensor: torch.Tensor, fakes: _Fakes) -> torch.Tensor:
    parameter: torch.Tensor = fakes.of(tensor)
    if not isinstance(tensor, nn.Parameter):
        return parameter
    # As `nn.Parameter(parameter)`, but `detach` is not dispatched.
    parameter = parameter.requires_grad_(tensor.requires_grad)
    mark_as_parameter(parameter)
    if getattr(tensor, "grad_dtype", tensor.dtype) != tensor.dtype:
        parameter.grad_dtype = tensor.grad_dtype
    if type(tensor) is not nn.Parameter:
        # PEFT and bitsandbytes check the class of a quantized parameter, and the name of the class.
        # If the class has another memory layout (DTensor), the fake stays dense.
        with contextlib.suppress(TypeError):
            give_class(parameter, type(tensor))
    return parameter


def _fill(copy: torch.Tensor, tensor: torch.Tensor, memo: dict[int, Any]) -> None:
    """Copy a tensor's attributes to its fake, except the attributes that every fake has."""
    for name, value in tensor.__dict__.items():
        if name not in copy.__dict__:
            copy.__dict__[name] = copied(value, memo)


class _FakeCopies(TorchFunctionMode):
    """A function mode in which `copy.deepcopy` of a tensor returns a fake."""

    def __init__(self, fakes: _Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                parameter = _empty_parameter(tensor, self._fakes)
                memo[id(tensor)] = parameter
                # The memo keeps the tensor alive: another tensor could get the same id.
                memo.setdefault(id(memo), []).append(tensor)
                _fill(parameter, tensor, memo)
            return memo[id(tensor)]
        if func == TENSOR_DATA and not isinstance(args[0], FakeTensor):
            return self._fakes.of(args[0])  # a parameter's `__deepcopy__` clones its `data`
        return func(*args, **(kwargs or {}))


_SHARDED = "_isotype_sharded"
"""Attribute of a gathered parameter: the parameter from which it was gathered."""


class _Gathering(torch.autograd.Function):
    """Returns a parameter in the dtype in which FSDP2 gathers it. The trace records no operator for the copy."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        with without_modes():
            return torch.empty_like(parameter, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype), None


def _gather_in_dtypes(model: nn.Module, twin: nn.Module) -> None:
    """Add hooks to a twin that cast parameters, inputs and outputs of modules, as FSDP2 does in `model`."""
    for group, (policy, names) in gathered_by(model).items():
        rows = [(twin.get_submodule(name.rpartition(".")[0]), name) for name in names]

        def before(_: Any, args: Any, kwargs: Any, policy: Any = policy, rows: Any = rows) -> Any:
            dtype = policy.param_dtype
            for module, name in rows if dtype is not None else ():
                attribute = name.rpartition(".")[2]
                parameter = getattr(getattr(module, attribute), _SHARDED, getattr(module, attribute))
                if parameter.dtype != dtype:
                    whole = _Gathering.apply(parameter, dtype)  # type: ignore[no-untyped-call]
                    setattr(whole, _SHARDED, parameter)
                    setattr(whole, ORIGIN, Origin("parameter", dtype, name))
                    getattr(module, PARAMETERS)[attribute] = whole
            if dtype is None or not policy.cast_forward_inputs:
                return None
            return _cast_floats((args, kwargs), dtype, PARAM_DTYPE)

        def after(_: Any, args: Any, output: Any, dtype: torch.dtype | None = policy.output_dtype) -> Any:
            return output if dtype is None else _cast_floats(output, dtype, OUTPUT_DTYPE)

        module = twin.get_submodule(group)
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after)


def restore_sharded(twin: nn.Module) -> None:
    """Give the modules of a twin their original parameters in place of the gathered parameters."""
    for module in twin.modules():
        parameters = getattr(module, PARAMETERS)
        for name, parameter in parameters.items():
            parameters[name] = getattr(parameter, _SHARDED, parameter)


def _cast_floats(values: Any, dtype: torch.dtype, option: str) -> Any:
    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dtype == dtype:
            return leaf
        result = leaf.to(dtype)
        origin = replace(getattr(result, ORIGIN), kind="operator", name=option, module="")
        setattr(result, ORIGIN, origin)
        return result

    return apply_like_fsdp(cast, values)
