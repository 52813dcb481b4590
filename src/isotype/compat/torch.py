"""torch (2.10 to 2.14): its private names under public names of isotype.

All private modules, functions and attributes of torch are used here only, so that a release that renames one
breaks only this file. tests/compat/test_torch.py fails if one is gone or changes its meaning. docs/compat.md
lists what is read here and what is replaced.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd.graph import _engine_run_backward
from torch.nn import attention
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from isotype.compat.replaced import Replacements
from isotype.compat.wrappers import ORIGINAL as ORIGINAL

FunctionSchema = torch._C.FunctionSchema

# ------------------------------------------------------------------------------------------------------ dispatch

without_modes = _disable_current_modes
"""Context without dispatch modes."""
without_dispatch = torch._C._DisableTorchDispatch
"""Context without `__torch_dispatch__` of subclasses: a wrapped tensor acts as the plain one below."""
without_functions = torch._C.DisableTorchFunction
"""Context without function modes and `__torch_function__` of subclasses."""
without_function_subclasses = torch._C.DisableTorchFunctionSubclass
"""Context without `__torch_function__` of subclasses, but with function modes."""
dispatch_depth: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack
"""The number of active Python dispatch modes."""


UNNAMED_VIEW = torch.ops.aten._unsafe_view.default
"""A view without alias annotations; a fused LoRA layer reshapes outputs with it."""
VARLEN_ATTENTION: Final = "torch_attn._varlen_attn"
"""The operator of `torch.nn.attention.varlen.varlen_attn`; its backward's name has the suffix `_backward`."""


class UncompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode without torch's compiler switch around each call: nothing is compiled under it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class ModeStack:
    """Primitives of one kind of mode stack, used by `torch.overrides` and `torch.utils._python_dispatch`."""

    def __init__(self, length: Any, at: Any, pop: Any, push: Any) -> None:
        self.length, self.at, self.pop, self.push = length, at, pop, push


FUNCTION_MODES = ModeStack(
    torch._C._len_torch_function_stack,
    torch._C._get_function_stack_at,
    torch._C._pop_torch_function_stack,
    torch._C._push_on_torch_function_stack,
)
DISPATCH_MODES = ModeStack(
    torch._C._len_torch_dispatch_stack,
    torch._C._get_dispatch_stack_at,
    lambda: torch._C._pop_torch_dispatch_stack(None),
    torch._C._push_on_torch_dispatch_stack,
)


def stack_of(mode: Any) -> ModeStack:
    """Return the stack for a mode of this kind."""
    return FUNCTION_MODES if isinstance(mode, TorchFunctionMode) else DISPATCH_MODES


def stays_at_the_bottom(mode: Any) -> bool:
    """Return whether a mode must stay at the bottom: the one of `torch.set_default_device`, and torch's own."""
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return mode is default or getattr(mode, "_mode_key", None) is not None


def is_simulated() -> bool:
    """Return whether tensors are fake, functional or proxies: no real computation."""
    keys = torch._C._TorchDispatchModeKey
    return any(
        torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    )


def is_traced() -> bool:
    """Return whether `torch.jit.trace` is tracing."""
    return torch._C._get_tracing_state() is not None


is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Return whether torch's profiler is recording."""


# ----------------------------------------------------------------------------------------------------- operators


def operator_packet(operator: Any) -> Any:
    """Return `torch.ops.aten.add` for `torch.ops.aten.add.Tensor`."""
    return operator._overloadpacket


def operator_schema(operator: Any) -> Any:
    """Return an operator's `torch._C.FunctionSchema`; None for a higher-order operator."""
    return getattr(operator, "_schema", None)


_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "hpu": "HPU"}  # ROCm's is CUDA


@cache
def has_kernel(operator: str, device: str) -> bool:
    """Return whether an operator (`aten::mm`) has its own kernel on a device type, besides compositions of
    others.

    torch's tests and functorch query it this way. bitsandbytes' operators are known after its import.
    """
    key = _KEYS.get(device)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


# ------------------------------------------------------------------------------------------------------ autograd

run_backward = _engine_run_backward
"""The engine call of `torch.autograd.backward`, after the checks of its arguments."""
current_node = torch._C._current_autograd_node
"""The graph node whose backward runs in this thread; None outside of one."""


_NO_BACKWARD = -1


def current_backward() -> int:
    """Return the number of the backward pass running in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread, also between nodes."""
    return current_backward() != _NO_BACKWARD


def last_node_number() -> int:
    """Return the sequence number of autograd's latest node in this thread."""
    return torch._C._autograd._get_sequence_nr() - 1


def node_number(node: Any) -> int:
    """Return the sequence number of a node."""
    return int(node._sequence_nr())


def after_backward(act: Callable[[], None]) -> None:
    """Run `act` at the end of the current backward pass, as DistributedDataParallel and FSDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


def forget_gradient_hooks(leaf: torch.Tensor) -> None:
    """Remove the empty hook dictionary of a leaf, which autograd would check in every backward."""
    if not leaf._post_accumulate_grad_hooks:
        leaf._post_accumulate_grad_hooks = None  # type: ignore[assignment]


is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether the caller runs inside a `torch.func` transform (`grad`, `vmap`, `jvp`, …).

Its tensors have no memory, and it rejects autograd functions without `setup_context`.
https://docs.pytorch.org/docs/stable/notes/extending.func.html
"""


def needs_operators() -> bool:
    """Return whether `torch.compile` or a `torch.func` transform traces the caller: both see only torch's operators."""
    return torch.compiler.is_compiling() or is_transformed()


def is_transformed_tensor(value: Any) -> bool:
    """Return whether a tensor is one of `torch.func`'s wrappers."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


# ------------------------------------------------------------------------------------------------------- tensors


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Tensor types whose memory may be read directly; subclasses may interpret theirs."""


def version_of(tensor: torch.Tensor) -> int | None:
    """Return a tensor's version counter (equal for equal values); None for a tensor made under `inference_mode`."""
    return None if tensor.is_inference() else tensor._version


def storage_key(storage: Any) -> int:
    """Return the identity of a storage: equal for views of the same memory, also on the meta device."""
    key: int = storage._cdata
    return key


def storage_of(tensor: torch.Tensor) -> int:
    """Return the `storage_key` of a tensor's storage."""
    return storage_key(tensor.untyped_storage())


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base of a view; a tensor that is no view itself."""
    return tensor if tensor._base is None else tensor._base


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Make `isinstance(tensor, nn.Parameter)` True for a tensor of another class, as `nn.Parameter` does."""
    tensor._is_param = True


dispatch_keys = torch._C._dispatch_key_set
"""Dispatch keys of a tensor: equal for tensors that dispatch alike."""
TENSOR_DATA: Final[Any] = vars(torch._C.TensorBase)["data"].__get__
"""The function that function modes get for `tensor.data`."""


def fake_of(memory: torch.Tensor, device: torch.device) -> Any:
    """Return a fake tensor on `device` over meta memory, without the attributes set by `FakeTensor.__new__`."""
    result = torch.Tensor._make_subclass(
        FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(result)
    return result


def give_class(fake: torch.Tensor, cls: Any) -> None:
    """Give a fake tensor the class of the tensor it represents; raises TypeError for another memory layout
    (DTensor).
    """
    fake.__class__ = cls if issubclass(cls, FakeTensor) else _fake_class(cls)


@cache
def _fake_class(cls: type) -> Any:
    return type(cls.__name__, (FakeTensor, cls), {"__module__": cls.__module__, "to": _moved})


def _moved(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the fake itself: bitsandbytes' `to` creates a parameter from the data, which fakes do not allow."""
    _, dtype, *_ = parsed_to(*args, **kwargs)
    return self if dtype in (None, self.dtype) else super(type(self), self).to(*args, **kwargs)


def unshard(model: nn.Module) -> bool:
    """Remove FSDP2's classes and hooks from a copy of a model; return whether there were any."""
    sharded = [module for module in model.modules() if hasattr(module, "set_reshard_after_forward")]
    for module in sharded:
        module.__class__ = type(module).__bases__[-1]
        for hooks in (forward_pre_hooks(module), forward_hooks(module)):
            for number, hook in list(hooks.items()):
                if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp"):
                    del hooks[number]
    return bool(sharded)


def parsed_to(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return (device, dtype, non_blocking, memory format) from the arguments of `Tensor.to`."""
    return tuple(torch._C._nn._parse_to(*args, **kwargs))


def unscale_(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Unscale the gradients of one device as GradScaler does, and record non-finite ones in `found_inf`."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def multiply_each(tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> list[torch.Tensor]:
    """Return each tensor times its number, in its dtype; one kernel on a GPU if all have one dtype."""
    return list(torch._foreach_mul(tuple(tensors), list(numbers)))


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target with a cast; one kernel on a GPU for equal dtypes and layouts."""
    torch._foreach_copy_(tuple(targets), tuple(sources))


def file_offset(storage: torch.UntypedStorage) -> int | None:
    """Return the offset of a meta storage in its file, as set by `torch.load`."""
    begin = getattr(storage, "_checkpoint_offset", None)
    return None if begin is None else int(begin)


# ------------------------------------------------------------------------------------------------------- modules

PARAMETERS: Final = "_parameters"
BUFFERS: Final = "_buffers"
CHILDREN: Final = "_modules"
HELD: Final = (CHILDREN, PARAMETERS, BUFFERS)
"""Attributes with a module's children, parameters and buffers."""
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
"""Attributes with a module's hooks."""
ALL_HOOKS: Final = (*HOOKS, "_backward_pre_hooks")
EXTRA_STATE: Final[str] = _EXTRA_STATE_KEY_SUFFIX
"""Suffix of the key of a module's extra state."""
MODULE_CALL: Final = nn.Module._call_impl.__code__
"""The code object in which a module calls its forward."""
COMPILED_CALL: Final = "_compiled_call_impl"
"""Attribute with the compiled code of `module.compile()`."""


# Functions instead of attrgetters: torch.compile traces a fused module's access to its hooks.
def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary of a module's own parameters."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary of a module's own buffers."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary of a module's children."""
    return module._modules


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks called after a module's forward."""
    return module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks called before a module's forward."""
    return module._forward_pre_hooks


class UncastBuffers(nn.Module):
    """A module whose buffers move between devices but keep their dtypes in casts."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def moved(buffer: torch.Tensor) -> torch.Tensor:
            return new if (new := fn(buffer)).dtype == buffer.dtype else buffer.to(new.device)

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]


def state_dict_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks called after a module's `state_dict`."""
    return module._state_dict_hooks


def own_state(module: nn.Module, into: dict[str, Any], prefix: str) -> None:
    """Write a module's own state, without its children, into `into`: views of its tensors, with their graph."""
    module._save_to_state_dict(into, prefix, True)


def original(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile(module)`."""
    return getattr(module, ORIGINAL, module)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled, in place or by `torch.compile`."""
    return hasattr(module, ORIGINAL) or getattr(module, COMPILED_CALL, None) is not None


# ------------------------------------------------------------------------------------------------------ the rest

FAKE_LOGGER: Final = "torch._subclasses.fake_tensor"
"""The logger that prints tracebacks of fake kernels' errors."""
COMPILER: Final = "torch._dynamo"
"""The compiler's package; importing it takes two seconds."""


def has_compiler() -> bool:
    """Return whether torch's compiler has been imported."""
    return COMPILER in sys.modules


SDPA_SETTER: Final = "_sdpa_kernel"
AUTOCAST_CAST: Final = "_cast"
"""The function of `torch.amp.autocast_mode` that casts for `custom_fwd(cast_inputs=…)`."""


def sdpa_setter() -> Callable[..., Any]:
    """Return the function by which `torch.nn.attention.sdpa_kernel` selects kernels."""
    setter: Callable[..., Any] = attention._sdpa_kernel
    return setter


def sdpa_backends() -> list[Any]:
    """Return the currently enabled attention backends."""
    return list(attention._cur_sdpa_kernel_backends())


# ------------------------------------------------------------------- modes below those of a running script
# A mode's `with` exits by popping the top of a stack. A script may enter a mode before ours and exit it
# before ours, so ours goes below the script's modes and is removed from wherever it is.


def put_under(*modes: TorchFunctionMode | TorchDispatchMode) -> None:
    """Enter modes below all modes of the script."""
    for mode in modes:
        stack = stack_of(mode)
        above = _pop_all(stack)
        stack.push(mode)
        _push_all(stack, above)


def take_out(*modes: TorchFunctionMode | TorchDispatchMode) -> None:
    """Exit modes that `put_under` entered and that are still active; the script's modes stay."""
    for mode in modes:
        stack = stack_of(mode)
        _push_all(stack, [other for other in _pop_all(stack) if other is not mode])


@contextmanager
def no_modes() -> Iterator[None]:
    """Disable all modes of the script inside."""
    kept = [(stack, _pop_all(stack)) for stack in (FUNCTION_MODES, DISPATCH_MODES)]
    try:
        yield
    finally:
        for stack, modes in kept:
            _push_all(stack, modes)


def _pop_all(stack: ModeStack) -> list[Any]:
    """Pop the script's modes and return them, top first; torch's own stay."""
    popped = []
    while stack.length() and not stays_at_the_bottom(stack.at(stack.length() - 1)):
        popped.append(stack.pop())
    return popped


def _push_all(stack: ModeStack, modes: list[Any]) -> None:
    for mode in reversed(modes):
        stack.push(mode)


# ------------------------------------------------------------------------------------------------------ replaced for a time


def around_backward(replaced: Replacements, wrapper: Callable[..., Any]) -> None:
    """Replace `torch.autograd.backward`, which `Tensor.backward` calls, by `wrapper(backward, tensors, …)`."""
    replaced.wrap(torch.autograd, "backward", wrapper)


def around_scaler_step(replaced: Replacements, wrapper: Callable[..., Any]) -> None:
    """Replace `GradScaler.step` by `wrapper(step, scaler, optimizer, …)`."""
    replaced.wrap(torch.amp.GradScaler, "step", wrapper)


@contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """Silence torch's logged tracebacks of fake kernels' errors, which include caught ones."""
    logger = logging.getLogger(FAKE_LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def cudnn_is_on() -> bool:
    """Return whether `torch.backends.cuda.enable_cudnn_sdp` enables cuDNN's attention kernel."""
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN's attention kernel inside."""
    was_on = cudnn_is_on()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


def forget_parametrized(module: nn.Module, name: str) -> None:
    """Drop the value of a parametrized tensor cached by `torch.nn.utils.parametrize.cached`."""
    parametrize._cache.pop((id(module), name), None)
