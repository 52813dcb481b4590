"""Context managers in which a model is built without initialization, or runs without side effects."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from isotype.compat.torch import (
    CHILDREN,
    PARAMETERS,
    TorchDispatchMode,
    has_values,
    operator_schema,
    parsed_to,
    tree_iter,
)
from isotype.core.operators import BFLOAT16_WITHOUT_MEMORY, operator_name, schema_of
from isotype.core.random_states import random_states_kept

# Functions by which layers and transformers' `init_weights` draw values. Each writes to its first argument and returns it.
_DRAWS = (
    *(nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_),
    *(torch.Tensor.uniform_, torch.Tensor.normal_),
)


class NoDraws(TorchFunctionMode):
    """Mode without random initialization of meta tensors, because it would take half a second for a thousand layers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


class KeepsValues(TorchFunctionMode):
    """Mode in which `to("meta")` does not move tensors with values, because PEFT would move new adapters of a meta model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and not args[0].is_meta:
            options = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, *_ = parsed_to(*args[1:], **options)
            if device is not None and device.type == "meta":
                return args[0] if dtype is None else args[0].to(dtype)
        return func(*args, **kwargs)


_CONTAINERS = (dict, OrderedDict, list, set)
_ITEM = torch.ops.aten._local_scalar_dense.default
_NUMBERS = (_ITEM, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default)
"""Operators that return a Python number. A meta tensor has no values to return."""
_PLACED = (PARAMETERS, CHILDREN)
"""Attributes that are not restored, because a forward of FSDP2 changes them together with the state of its hooks."""


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """In the `with` block, a model is in evaluation mode, without gradients. At the end of the block, the model and the
    random states are restored.

    A forward may change attributes, containers, parameters and buffers. For example, caches keep the last keys, and
    PEFT's Arrow changes adapters. On the meta device, a condition on a tensor (`if mask.all():`) is true, and a
    number read from a tensor is 1.
    """
    attributes = [vars(module) for module in model.modules()]
    items = (item for values in attributes for item in values.items())
    containers: list[Any] = [v for name, v in items if type(v) in _CONTAINERS and name not in _PLACED]
    saved = [(container, container.copy()) for container in (*containers, *attributes)]
    writes = _Writes(model)
    try:
        with torch.no_grad(), random_states_kept(), writes:
            model.eval()
            yield
    finally:
        writes.undo()
        for container, content in saved:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that saves parameters and buffers before operators overwrite them. Numbers read from meta tensors are 1."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unsaved: dict[int, list[torch.Tensor]] = defaultdict(list)  # by the address of their storage
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in chain(model.parameters(), model.buffers()):
            if has_values(tensor):
                self._unsaved[tensor.untyped_storage().data_ptr()].append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NUMBERS and args[0].is_meta:
            dtype = args[0].dtype
            number = True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
            return number if func is _ITEM else True
        grouped = operator_name(func) in BFLOAT16_WITHOUT_MEMORY and args[0].is_meta
        if grouped and args[0].dim() < args[1].dim():
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        schema = operator_schema(func)  # None for higher-order operators
        if schema is not None and schema.is_mutable:
            arguments = dict(zip(schema_of(func).roles, args, strict=False)) | (kwargs or {})
            for tensor in tree_iter([arguments.get(name) for name in schema_of(func).written]):
                if isinstance(tensor, torch.Tensor) and has_values(tensor):
                    self._keep(tensor.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))

    def _keep(self, place: int) -> None:
        self._saved += [(tensor, tensor.detach().clone()) for tensor in self._unsaved.pop(place, ())]

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, values in self._saved:
            tensor.copy_(values)


def result_of(call: Callable[..., Any], *operands: torch.Tensor) -> Any:
    """Return `call(*operands)`, run without autograd and autocast; None if it raises an error."""
    device = operands[0].device.type
    try:
        with torch.no_grad(), torch.autocast("cpu" if device == "meta" else device, enabled=False):
            return call(*operands)
    except Exception:  # noqa: BLE001 - code that expects other arguments may raise anything
        return None


def is_close(result: Any, wanted: torch.Tensor, rtol: float, atol: float) -> bool:
    """Return True if `result` has the shape of `wanted` (float64, on a CPU) and, within the tolerances, its values."""
    return (
        isinstance(result, torch.Tensor)
        and result.shape == wanted.shape
        and torch.allclose(result.cpu().double(), wanted, rtol=rtol, atol=atol)
    )
