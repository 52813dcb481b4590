"""torch (2.10 to 2.15): public names for torch's private functions, for the rest of isotype.

Code outside of `compat/` uses no private name of torch. tests/compat/test_torch.py fails if a name below is missing or
means something else. docs/compat.md lists all names.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

from isotype.compat.replaced import Replacements, reads, replaced
from isotype.compat.wrappers import ORIGINAL as ORIGINAL

# ------------------------------------------------------------------------------------------------------ dispatch

without_modes = _disable_current_modes
"""Context manager that disables all dispatch modes."""
without_dispatch = torch._C._DisableTorchDispatch
"""Context manager that turns `__torch_dispatch__` of tensor subclasses off, so that they act as plain tensors."""
without_functions = torch._C.DisableTorchFunction
"""Context manager that turns function modes and `__torch_function__` of tensor subclasses off."""
without_function_subclasses = torch._C.DisableTorchFunctionSubclass
"""Context manager that turns `__torch_function__` of tensor subclasses off. Function modes stay active."""
dispatch_depth: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack
"""The number of active Python dispatch modes."""


UNNAMED_VIEW = torch.ops.aten._unsafe_view.default
"""A view operator whose schema has no alias annotations."""
VARLEN_ATTENTION: Final = "torch_attn._varlen_attn"
"""The operator of `torch.nn.attention.varlen.varlen_attn`. The backward's name ends in `_backward`."""


class UncompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that torch does not wrap in `torch._dynamo.disable`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_CASTS_INSIDE = frozenset(
    {
        torch.ops.aten._sparse_addmm,
        torch.ops.aten.linalg_matrix_exp,
        torch.ops.aten.linalg_pinv,
        torch.ops.aten.roll,
        torch.ops.aten._chunk_cat,
    }
)
"""Operators whose kernels call functions in the CPU's autocast lists."""


def run_in_mode(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator in a dispatch mode. torch disables autocast in a mode, but the kernels in `_CASTS_INSIDE` use it."""
    if isinstance(func, OpOverload) and operator_packet(func) in _CASTS_INSIDE:
        with enable_reentrant_dispatch():  # in the state at the operator's call
            casts = torch.is_autocast_enabled("cpu")
        if casts:
            with torch.autocast("cpu", torch.get_autocast_dtype("cpu")):
                return func(*args, **kwargs)
    return func(*args, **kwargs)


class ModeStack:
    """The functions that read and change one of torch's two stacks of modes: function modes or dispatch modes."""

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
    return FUNCTION_MODES if isinstance(mode, TorchFunctionMode) else DISPATCH_MODES


def stays_at_the_bottom(mode: Any) -> bool:
    """Return whether `mode` is the default device's mode, or an infrastructure mode of torch (such as a fake mode)."""
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return mode is default or getattr(mode, "_mode_key", None) is not None


def is_simulated() -> bool:
    """Return whether a fake, functional or proxy mode is active. In such a mode, operators compute no values."""
    keys = torch._C._TorchDispatchModeKey
    modes = keys.FAKE, keys.PROXY, keys.FUNCTIONAL
    return any(torch._C._get_dispatch_mode(key) is not None for key in modes)


def is_traced() -> bool:
    return torch._C._get_tracing_state() is not None


is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Return whether torch's profiler is recording."""

# ----------------------------------------------------------------------------------------------------- operators


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor can be read; meta, fake, sharded and other wrapper tensors refuse this."""
    plain: Any = torch.Tensor.__torch_dispatch__
    return type(tensor).__torch_dispatch__ is plain and not tensor.is_meta


operator_packet = attrgetter("_overloadpacket")
"""Return `torch.ops.aten.add` for `torch.ops.aten.add.Tensor`."""
operator_schema = reads("_schema")
"""Return an operator's `torch._C.FunctionSchema`; None for a higher-order operator."""
_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "hpu": "HPU"}  # ROCm has the key CUDA


@cache
def has_kernel(operator: str, device: str) -> bool:
    """Return whether an operator (`aten::mm`) has its own kernel for a device type; False if it calls other operators."""
    key = _KEYS.get(device)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


# ------------------------------------------------------------------------------------------------------ autograd

run_backward = _engine_run_backward
"""The function of autograd's engine that `torch.autograd.backward` calls after checking its arguments."""
current_node = torch._C._current_autograd_node
"""Return the graph node whose backward runs in this thread; None if there is none."""


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def sizes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; for a jagged tensor, whose own sizes are no numbers, the shape of its values."""
    values: Any = tensor._values if tensor.layout is torch.jagged else tensor
    return tuple(values.shape)


def last_node_number() -> int:
    return torch._C._autograd._get_sequence_nr() - 1


def node_number(node: Any) -> int:
    return int(node._sequence_nr())


def forget_gradient_hooks(leaf: torch.Tensor) -> None:
    """Remove an empty dictionary of hooks from a leaf tensor. Autograd would read it in every backward."""
    if not leaf._post_accumulate_grad_hooks:
        leaf._post_accumulate_grad_hooks = None  # type: ignore[assignment]


is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether the caller runs in a `torch.func` transform (`grad`, `vmap`, `jvp`, …).

The tensors in a transform are wrappers without a storage. A transform rejects autograd functions without
`setup_context`. https://docs.pytorch.org/docs/stable/notes/extending.func.html
"""
is_transformed_tensor: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Return whether a tensor is a wrapper of a `torch.func` transform."""


def needs_operators() -> bool:
    """Return whether `torch.compile` or a `torch.func` transform traces the caller. Both support only torch's operators."""
    return torch.compiler.is_compiling() or is_transformed()


# ------------------------------------------------------------------------------------------------------- tensors

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Tensor classes that keep their values in their storage. A subclass may keep its values elsewhere."""


def version_of(tensor: torch.Tensor) -> int | None:
    """Return a tensor's version counter, the number of in-place writes; None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


def storage_key(storage: Any) -> int:
    """Return a number that identifies a storage, also on the meta device. All its views have the same number."""
    key: int = storage._cdata
    return key


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that store a sparse tensor's indices and values; for a dense tensor, `(tensor,)`."""
    names = _PARTS.get(tensor.layout)
    return (tensor,) if names is None else tuple(getattr(tensor, name)() for name in names)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the `storage_key` of a tensor's storage; for a sparse tensor, of its values' storage."""
    return storage_key(dense_parts(tensor)[-1].untyped_storage())


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base tensor of a view; for another tensor, `tensor` itself."""
    return tensor if tensor._base is None else tensor._base


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Make `isinstance(tensor, nn.Parameter)` True for a tensor of any class, by torch's attribute `_is_param`."""
    tensor._is_param = True


dispatch_keys = torch._C._dispatch_key_set
"""Return the dispatch keys of a tensor. They decide which kernel of an operator torch runs."""
TENSOR_DATA: Final[Any] = vars(torch._C.TensorBase)["data"].__get__
"""The function that a function mode gets when code reads `tensor.data`."""


def fake_of(memory: torch.Tensor, device: torch.device) -> Any:
    """Make the meta tensor `memory` a fake tensor on `device`, without the attributes that `FakeTensor.__new__` sets."""
    result = torch.Tensor._make_subclass(
        FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(result)
    return result


def give_class(fake: torch.Tensor, cls: Any) -> None:
    """Make a fake tensor an instance of `cls`. Raise TypeError if Python does not allow this class change (DTensor)."""
    fake.__class__ = cls if issubclass(cls, FakeTensor) else _fake_class(cls)


@cache
def _fake_class(cls: type) -> Any:
    return type(cls.__name__, (FakeTensor, cls), {"__module__": cls.__module__, "to": _moved})


def _moved(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the method `to` of bitsandbytes' classes, which fails for fake tensors if the dtype stays the same."""
    _, dtype, *_ = parsed_to(*args, **kwargs)
    return self if dtype in (None, self.dtype) else super(type(self), self).to(*args, **kwargs)


def parsed_to(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Parse the arguments of a `Tensor.to` call: (device, dtype, non_blocking, memory format)."""
    return tuple(torch._C._nn._parse_to(*args, **kwargs))


def loss_scale(scaler: Any) -> torch.Tensor | float | None:
    """Return a GradScaler's loss scale without synchronizing; None if `scaler` is None or disabled.

    The scale is a float32 tensor of shape `[]` on the GradScaler's device. Before the first backward, it is a number.
    """
    if scaler is None or not scaler.is_enabled():
        return None
    scale: torch.Tensor | None = scaler._scale
    return float(scaler.get_scale()) if scale is None else scale.reshape(())


stored_scale = reads("_scale")
"""Return the tensor by which `scaler.scale` multiplies; None before its first call and for a disabled scaler."""


def unscale_(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Unscale one device's gradients in place, like GradScaler. Set `found_inf` to 1 if a gradient is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def multiply_each(tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> list[torch.Tensor]:
    """Multiply each tensor by the number at its index, in its own dtype. For equal dtypes, a GPU runs one kernel."""
    return list(torch._foreach_mul(tuple(tensors), list(numbers)))


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy and cast each source into the target at its index. For equal dtypes and layouts, a GPU runs one kernel."""
    torch._foreach_copy_(tuple(targets), tuple(sources))


def file_offset(storage: torch.UntypedStorage) -> int | None:
    """Return the offset of a meta storage's data in the file that `torch.load` read; None for another storage."""
    begin = getattr(storage, "_checkpoint_offset", None)
    return None if begin is None else int(begin)


# ------------------------------------------------------------------------------------------------------- modules

PARAMETERS: Final = "_parameters"
BUFFERS: Final = "_buffers"
CHILDREN: Final = "_modules"
HELD: Final = (CHILDREN, PARAMETERS, BUFFERS)
"""Module attributes with children, parameters and buffers."""
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
ALL_HOOKS: Final = (*HOOKS, "_backward_pre_hooks")
EXTRA_STATE: Final[str] = _EXTRA_STATE_KEY_SUFFIX
"""Suffix of the state dict key of a module's extra state."""
MODULE_CALL: Final = nn.Module._call_impl.__code__
"""The code object of torch that calls a module's forward."""
COMPILED_CALL: Final = "_compiled_call_impl"
"""Module attribute with the compiled code after `module.compile()`."""


# These are functions and not attrgetters, because torch.compile traces how a fused module reads its hooks.
def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary of a module's parameters, without its children's."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary of a module's buffers, without its children's."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    return module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    return module._forward_pre_hooks


class UncastBuffers(nn.Module):
    """A module whose buffers keep their dtypes if the module is cast. They still move between devices."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def moved(buffer: torch.Tensor) -> torch.Tensor:
            return new if (new := fn(buffer)).dtype == buffer.dtype else buffer.to(new.device)

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]


state_dict_hooks = attrgetter("_state_dict_hooks")


def own_state(module: nn.Module, into: dict[str, Any], prefix: str) -> None:
    """Add a module's parameters and buffers, but not its submodules', to `into`. The tensors are not detached."""
    module._save_to_state_dict(into, prefix, True)


def original(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wraps, or another module unchanged."""
    return getattr(module, ORIGINAL, module)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled by `module.compile()` or `torch.compile`."""
    return hasattr(module, ORIGINAL) or getattr(module, COMPILED_CALL, None) is not None


# --------------------------------------------------------------------------------------------------- settings

FAKE_LOGGER: Final = "torch._subclasses.fake_tensor"
COMPILER: Final = "torch._dynamo"
"""The compiler's package; importing it takes two seconds."""


def has_compiler() -> bool:
    return COMPILER in sys.modules


# ------------------------------------------------------------------- modes below those of a running script
# When the `with` block of a mode ends, it pops the top of the stack. A script may enter its mode before isotype's mode
# and leave it first. So isotype puts its mode below the script's modes, and removes it from any position.


def put_under(*modes: TorchFunctionMode | TorchDispatchMode) -> None:
    """Put `modes` at the bottom of the stack: below the modes that the script has entered, above a mode with `is_lowest`."""
    for mode in modes:
        stack = stack_of(mode)
        others = _pop_all(stack)
        lowest = [other for other in others if hasattr(other, "is_lowest")]
        _push_all(stack, [*(other for other in others if other not in lowest), mode, *lowest])


def take_out(*modes: TorchFunctionMode | TorchDispatchMode) -> None:
    """Exit modes of `put_under` that are still active. The script's modes stay."""
    for mode in modes:
        stack = stack_of(mode)
        _push_all(stack, [other for other in _pop_all(stack) if other is not mode])


@contextmanager
def no_modes() -> Iterator[None]:
    """Disable all modes of the script inside the `with` block."""
    with ExitStack() as after:
        for stack in (FUNCTION_MODES, DISPATCH_MODES):
            after.callback(_push_all, stack, _pop_all(stack))
        yield


@contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """Let autograd save tensors without the script's hooks, such as the hooks of `torch.utils.checkpoint.checkpoint`."""
    hooks: Any = torch._C._autograd
    with ExitStack() as after:
        while (top := hooks._top_saved_tensors_default_hooks(False)) is not None:
            hooks._pop_saved_tensors_default_hooks()
            after.callback(hooks._push_saved_tensors_default_hooks, *top)
        yield


def _pop_all(stack: ModeStack) -> list[Any]:
    """Pop the script's modes and return them, the top first. torch's internal modes stay."""
    popped = []
    while stack.length() and not stays_at_the_bottom(stack.at(stack.length() - 1)):
        popped.append(stack.pop())
    return popped


def _push_all(stack: ModeStack, modes: list[Any]) -> None:
    for mode in reversed(modes):
        stack.push(mode)


# ------------------------------------------------------------------------------------------------------ replaced for a time


def around_backward(methods: Replacements, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(backward, tensors, …)` replace `torch.autograd.backward`, which `Tensor.backward` calls."""
    methods.wrap(torch.autograd, "backward", wrapper)


def around_scaler_step(methods: Replacements, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(step, scaler, optimizer, …)` replace `GradScaler.step`."""
    methods.wrap(torch.amp.GradScaler, "step", wrapper)


def fake_errors_unlogged() -> AbstractContextManager[None]:
    """Hide the tracebacks of errors in fake kernels: torch logs them even if the errors are caught."""
    # A new level would clear what all loggers have cached.
    return replaced(logging.getLogger(FAKE_LOGGER), "disabled", True)


def forget_parametrized(module: nn.Module, name: str) -> None:
    """Drop a parametrized tensor's cached value (`torch.nn.utils.parametrize.cached`)."""
    parametrize._cache.pop((id(module), name), None)


def runs_without_gradients(function: Any) -> bool:
    """Return whether a function is decorated by `torch.no_grad` or `torch.inference_mode`."""
    while function is not None:
        values = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
        contexts = (getattr(value, "__self__", value) for value in values)
        if any(isinstance(context, (torch.no_grad, torch.inference_mode)) for context in contexts):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
