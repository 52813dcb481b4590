"""torch (2.10 to 2.14): what has no public name, under names of ours.

Every import of torch's private modules, every private function and attribute of its tensors and modules is here, so a release of
torch that renames one breaks this file and no other. tests/compat/test_torch.py fails where one is gone or means something else.
docs/compat.md lists what is read here and what is replaced.
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
"""Within it no dispatch mode is asked."""
without_dispatch = torch._C._DisableTorchDispatch
"""Within it a subclass's `__torch_dispatch__` is not asked: a wrapped tensor is the plain one below."""
without_functions = torch._C.DisableTorchFunction
"""Within it neither function modes nor a subclass's `__torch_function__` are asked."""
without_function_subclasses = torch._C.DisableTorchFunctionSubclass
"""Within it function modes are asked, a subclass's `__torch_function__` is not."""
dispatch_depth: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes of Python's are on."""


UNNAMED_VIEW = torch.ops.aten._unsafe_view.default
"""An operator whose schema names no alias, but which copies nothing; a fused LoRA layer shapes its outputs by it before they have numbers."""
VARLEN_ATTENTION: Final = "torch_attn._varlen_attn"
"""The operator below `torch.nn.attention.varlen.varlen_attn`; its backward's name is that and `_backward`."""


class UncompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose every call torch does not wrap in a switch of its compiler: nothing is compiled under it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class ModeStack:
    """The stack of one kind of mode: its primitives, of which `torch.overrides` and `torch.utils._python_dispatch` are built."""

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
    """The stack that a mode of this kind lies on."""
    return FUNCTION_MODES if isinstance(mode, TorchFunctionMode) else DISPATCH_MODES


def stays_at_the_bottom(mode: Any) -> bool:
    """Whether nothing may lie below a mode: `torch.set_default_device` looks for its own at the bottom, and torch's own have a place."""
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return mode is default or getattr(mode, "_mode_key", None) is not None


def is_simulated() -> bool:
    """Whether fake, functional or proxy tensors are being made: nothing real runs."""
    keys = torch._C._TorchDispatchModeKey
    return any(
        torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    )


def is_traced() -> bool:
    """Whether `torch.jit.trace` records what runs."""
    return torch._C._get_tracing_state() is not None


is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether torch's profiler records what runs."""


# ----------------------------------------------------------------------------------------------------- operators


def operator_packet(operator: Any) -> Any:
    """`torch.ops.aten.add` of `torch.ops.aten.add.Tensor`."""
    return operator._overloadpacket


def operator_schema(operator: Any) -> Any:
    """The schema of an operator (`torch._C.FunctionSchema`); None for an operator of higher order, which has none."""
    return getattr(operator, "_schema", None)


_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "hpu": "HPU"}  # ROCm's is CUDA


@cache
def has_kernel(operator: str, device: str) -> bool:
    """Whether an operator (`aten::mm`) has a kernel of its own on a device type, and no composition of others alone.

    torch's own tests and functorch ask this way. An operator of bitsandbytes' is known once bitsandbytes is imported.
    """
    key = _KEYS.get(device)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


# ------------------------------------------------------------------------------------------------------ autograd

run_backward = _engine_run_backward
"""What `torch.autograd.backward` calls when it has looked at its arguments."""
current_node = torch._C._current_autograd_node
"""The node of the graph whose backward runs in this thread; None outside of one."""


_NO_BACKWARD = -1


def current_backward() -> int:
    """The number of the backward pass that runs in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether a backward pass runs in this thread, between nodes too."""
    return current_backward() != _NO_BACKWARD


def last_node_number() -> int:
    """The sequence number of the node that autograd made last in this thread."""
    return torch._C._autograd._get_sequence_nr() - 1


def node_number(node: Any) -> int:
    """The sequence number of a node."""
    return int(node._sequence_nr())


def after_backward(act: Callable[[], None]) -> None:
    """Called in a backward pass: run `act` when it has ended, as DistributedDataParallel and FSDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


def forget_gradient_hooks(leaf: torch.Tensor) -> None:
    """Where a leaf's last hook on its gradient has been removed, leave nothing that autograd would look at in later backwards."""
    if not leaf._post_accumulate_grad_hooks:
        leaf._post_accumulate_grad_hooks = None  # type: ignore[assignment]


is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` (`grad`, `vmap`, `jvp` …) runs the code that calls.

Its tensors have no memory of their own, and it refuses functions of autograd's that have no `setup_context`: what has neither
loops nor functions of that kind has to compute. https://docs.pytorch.org/docs/stable/notes/extending.func.html
"""


def is_transformed_tensor(value: Any) -> bool:
    """Whether a tensor is one of `torch.func`'s wrappers."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


# ------------------------------------------------------------------------------------------------------- tensors


PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose memory may be read: a subclass may mean something else by its own."""


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor has been written to: two equal numbers mean the same values.

    None for a tensor made under `torch.inference_mode`, which counts nothing: nobody can tell whether it was written to.
    """
    return None if tensor.is_inference() else tensor._version


def storage_key(storage: Any) -> int:
    """What tells one storage from another: the same for two views of one memory, on the meta device too."""
    key: int = storage._cdata
    return key


def storage_of(tensor: torch.Tensor) -> int:
    """`storage_key` of a tensor's storage."""
    return storage_key(tensor.untyped_storage())


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view was made of; a tensor that is no view itself."""
    return tensor if tensor._base is None else tensor._base


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Let `isinstance(tensor, nn.Parameter)` hold for a tensor of another class, as `nn.Parameter` itself does."""
    tensor._is_param = True


dispatch_keys = torch._C._dispatch_key_set
"""Which parts of torch take a tensor's operators: equal for tensors that are handled alike."""
TENSOR_DATA: Final[Any] = vars(torch._C.TensorBase)["data"].__get__
"""What function modes are told of `tensor.data`."""


def fake_of(memory: torch.Tensor, device: torch.device) -> Any:
    """A fake tensor on `device` over memory of the meta device, without its mode: what `FakeTensor.__new__` makes, but for its attributes."""
    result = torch.Tensor._make_subclass(
        FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(result)
    return result


def give_class(fake: torch.Tensor, cls: Any) -> None:
    """Give a fake the class of the tensor that it stands for, by which libraries know a parameter.

    Raises:
        TypeError: a class of another layout of memory (DTensor).
    """
    fake.__class__ = cls if issubclass(cls, FakeTensor) else _fake_class(cls)


@cache
def _fake_class(cls: type) -> Any:
    return type(cls.__name__, (FakeTensor, cls), {"__module__": cls.__module__, "to": _moved})


def _moved(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A fake stays where it is: bitsandbytes' `to` builds a new parameter from the data, which no fake allows."""
    _, dtype, *_ = parsed_to(*args, **kwargs)
    return self if dtype in (None, self.dtype) else super(type(self), self).to(*args, **kwargs)


def unshard(model: nn.Module) -> bool:
    """Take FSDP2's classes and hooks off the modules of a copy of a model; whether there were any."""
    sharded = [module for module in model.modules() if hasattr(module, "set_reshard_after_forward")]
    for module in sharded:
        module.__class__ = type(module).__bases__[-1]
        for hooks in (forward_pre_hooks(module), forward_hooks(module)):
            for number, hook in list(hooks.items()):
                if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp"):
                    del hooks[number]
    return bool(sharded)


def parsed_to(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """(device, dtype, non_blocking, memory format) of the arguments of `Tensor.to`."""
    return tuple(torch._C._nn._parse_to(*args, **kwargs))


def unscale_(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """What GradScaler does to the gradients of one device: multiply them, and note whether one is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def multiply_each(tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> list[torch.Tensor]:
    """Each tensor times its number, in its dtype; one kernel on a GPU where all have one dtype."""
    return list(torch._foreach_mul(tuple(tensors), list(numbers)))


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, rounded to its dtype; one kernel on a GPU where sources, and targets, have one dtype and pairs one layout."""
    torch._foreach_copy_(tuple(targets), tuple(sources))


def file_offset(storage: torch.UntypedStorage) -> int | None:
    """Where in its file a storage begins, by a note that `torch.load` leaves on those of the meta device."""
    begin = getattr(storage, "_checkpoint_offset", None)
    return None if begin is None else int(begin)


# ------------------------------------------------------------------------------------------------------- modules

PARAMETERS: Final = "_parameters"
BUFFERS: Final = "_buffers"
CHILDREN: Final = "_modules"
HELD: Final = (CHILDREN, PARAMETERS, BUFFERS)
"""Names of the dictionaries in which a module holds what belongs to it."""
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
"""Names of the dictionaries of what is called with a module."""
ALL_HOOKS: Final = (*HOOKS, "_backward_pre_hooks")
EXTRA_STATE: Final[str] = _EXTRA_STATE_KEY_SUFFIX
"""How the key of a module's extra state ends."""
MODULE_CALL: Final = nn.Module._call_impl.__code__
"""The code in which a module calls its forward."""
COMPILED_CALL: Final = "_compiled_call_impl"
"""Where `module.compile()` leaves compiled code."""


# Functions and no attrgetters: torch.compile traces what a fused module's forward asks of its hooks.
def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary in which a module holds its own parameters."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The dictionary in which a module holds its own buffers."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary in which a module holds its children."""
    return module._modules


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """What is called after a module's forward."""
    return module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """What is called before a module's forward."""
    return module._forward_pre_hooks


class UncastBuffers(nn.Module):
    """A module whose buffers go where it is moved to, and keep their dtypes whatever it is cast to."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def moved(buffer: torch.Tensor) -> torch.Tensor:
            return new if (new := fn(buffer)).dtype == buffer.dtype else buffer.to(new.device)

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]


def state_dict_hooks(module: nn.Module) -> dict[int, Any]:
    """The hooks that run when a module has written its `state_dict`."""
    return module._state_dict_hooks


def own_state(module: nn.Module, into: dict[str, Any], prefix: str) -> None:
    """Put what a module saves of itself, without its children, into `into`: views of its tensors, with their graph."""
    module._save_to_state_dict(into, prefix, True)


def original(module: nn.Module) -> nn.Module:
    """The module inside of `torch.compile(module)`."""
    return getattr(module, ORIGINAL, module)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module run compiled code: it was compiled in place or is a wrapper of `torch.compile`."""
    return hasattr(module, ORIGINAL) or getattr(module, COMPILED_CALL, None) is not None


# ------------------------------------------------------------------------------------------------------ the rest

FAKE_LOGGER: Final = "torch._subclasses.fake_tensor"
"""The logger that prints a traceback of what a fake kernel refuses."""
COMPILER: Final = "torch._dynamo"
"""The package that compiles; it takes two seconds to import."""


def has_compiler() -> bool:
    """Whether torch's compiler has been imported."""
    return COMPILER in sys.modules


SDPA_SETTER: Final = "_sdpa_kernel"
AUTOCAST_CAST: Final = "_cast"
"""The function of `torch.amp.autocast_mode` that `custom_fwd(cast_inputs=…)` casts by."""


def sdpa_setter() -> Callable[..., Any]:
    """What `torch.nn.attention.sdpa_kernel` chooses kernels by."""
    setter: Callable[..., Any] = attention._sdpa_kernel
    return setter


def sdpa_backends() -> list[Any]:
    """The kernels that attention may take now."""
    return list(attention._cur_sdpa_kernel_backends())


# ------------------------------------------------------------------------------- modes below those of a running script
# A mode's own `with` leaves by popping the top of a stack. A script may have entered a mode before ours and leave it
# before ours, so ours goes to the bottom of the script's modes and is taken out from wherever it then is.


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


# ------------------------------------------------------------------------------------------------------ replaced for a time


def around_backward(replaced: Replacements, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(backward, tensors, …)` run in the place of `torch.autograd.backward`, which `Tensor.backward` calls, too."""
    replaced.wrap(torch.autograd, "backward", wrapper)


def around_scaler_step(replaced: Replacements, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(step, scaler, optimizer, …)` run in the place of `GradScaler.step`."""
    replaced.wrap(torch.amp.GradScaler, "step", wrapper)


@contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """torch logs a traceback of every error of a fake kernel, those that are caught, too; not within."""
    logger = logging.getLogger(FAKE_LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def cudnn_is_on() -> bool:
    """Whether `torch.backends.cuda.enable_cudnn_sdp` leaves cuDNN's kernel of attention on."""
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Attention by torch's other kernels within it."""
    was_on = cudnn_is_on()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


def forget_parametrized(module: nn.Module, name: str) -> None:
    """Drop the value of a parametrized tensor that `torch.nn.utils.parametrize.cached` keeps."""
    parametrize._cache.pop((id(module), name), None)
