"""Finds the inputs of a step that may affect its loss, and the trainable parameters that get a gradient.

An input that no operator connects to the loss cannot change the loss. For all other inputs, `trace/reach` measures on a
small copy of the model whether they change it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from traceback import walk_stack
from typing import Any

import torch

from isotype.compat.standard import frame_above
from isotype.compat.torch import storage_of
from isotype.core.operators import leaves
from isotype.core.source import shown
from isotype.records.reach import Unreached
from isotype.records.trace import Origin
from isotype.trace.fake.values import is_data_dependent
from isotype.trace.operator_call import OperatorCall

aten = torch.ops.aten

# Operators that return the tensor without its graph and do not use its values.
_CUTS = frozenset({aten.detach.default, aten.alias.default})
# Under autocast, the cast of a weight has a gradient even under `torch.no_grad()`. So only uses of its result count.
_CAST = aten._to_copy.default

_PARAMETER = "_isotype_parameter"
"""Attribute of a cast's result: the id of the parameter that was cast."""


class InputReach:
    """Records on which inputs of the forward each storage may depend: on those of all operands that computed it."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._masks: dict[int, int] = {}  # storage -> a bit for each input
        self._read = 0

    def begin(self, name: str, tensor: torch.Tensor) -> None:
        self._masks[storage_of(tensor)] = self._mask(tensor) | 1 << len(self._names)
        self._names.append(name)

    def record(self, call: OperatorCall, result: Any) -> None:
        """Record an operator: its results, and the operands that it overwrites, depend on the inputs of all operands."""
        sources = {storage_of(tensor) for _, tensor in call.tensors}
        mask = 0
        for storage in sources:
            mask |= self._masks.get(storage, 0)
        if is_data_dependent(call.func):  # the code may branch on these values
            self._read |= mask
        for tensor in leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = storage_of(tensor)
                self._masks[storage] = mask | (self._masks.get(storage, 0) if storage in sources else 0)
        for tensor in call.written:
            self.mix(tensor, call.tensors)

    def mix(self, tensor: torch.Tensor, operands: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Record that `tensor` was overwritten with values that depend on `operands`."""
        for _, operand in operands:
            self._masks[storage_of(tensor)] = self._mask(tensor) | self._mask(operand)

    def without_effect(self, loss: torch.Tensor) -> tuple[str, ...]:
        """Return the names of inputs that affect neither the loss nor a branch of the code."""
        reached = self._read | self._mask(loss)
        return tuple(name for at, name in enumerate(self._names) if not reached >> at & 1)

    def _mask(self, tensor: torch.Tensor) -> int:
        return self._masks.get(storage_of(tensor), 0)


class Gradients:
    """Records which trainable parameters a step uses, and which of them get a gradient.

    Attributes:
        reached: ids of the parameters whose gradient has been accumulated.
        behind: names of the modules whose forward has returned with gradients on, in order.
    """

    def __init__(self) -> None:
        self.reached: set[int] = set()
        self.behind: list[str] = []
        self._used: dict[int, Unreached] = {}
        self._off: dict[int, Unreached] = {}

    def used(self, call: OperatorCall, result: Any, names: Mapping[int, Origin]) -> None:
        """Record the parameters among the operands of a forward operator. `names` maps tensor ids to origins."""
        if call.func in _CUTS:
            return
        for _, tensor in call.tensors:
            cast_of = getattr(tensor, _PARAMETER, None)  # in torch 2.10, the cast may require no gradient
            key = id(tensor) if cast_of is None else cast_of
            origin = names.get(key)
            trainable = cast_of is not None or tensor.requires_grad
            if origin is None or origin.kind != "parameter" or not trainable:
                continue
            if call.func is _CAST:
                setattr(result, _PARAMETER, key)
                continue
            function = None if torch.is_grad_enabled() else _function()
            uses = self._used if function is None else self._off
            if key not in uses:
                place, behind, ignored = call.place, tuple(self.behind), function is None
                at = shown(place.source)
                uses[key] = Unreached(origin.name, place.module, at, function or "", behind, ignored)

    def unreached(self, cuts: Mapping[int, str], frozen: Mapping[int, Any]) -> Iterator[Unreached]:
        """Yield the parameters that the forward used but that got no gradient. `Recorder` explains `cuts` and `frozen`."""
        for key, unreached in {**self._off, **self._used}.items():
            if key not in self.reached:
                line, _ = frozen.get(key, ("", 0))
                cut = cuts.get(key, "") if unreached.ignored else ""
                yield replace(unreached, cut=cut, frozen=line, ignored=unreached.ignored and not line)


def _function() -> str | None:
    """Return why gradients are off: the name of the running `torch.autograd.Function`, or "" for `torch.no_grad()`.

    Reentrant gradient checkpointing is such a function if its inputs require no gradient. Return None if a function
    runs its forward with gradients on and computes the gradients itself, as a fused layer does.
    """
    for frame, _ in walk_stack(frame_above(2)):
        first = next(iter(frame.f_code.co_varnames), "")
        context = frame.f_locals.get(first) if frame.f_code.co_name == "forward" else None
        if isinstance(context, torch.autograd.function.BackwardCFunction):
            if any(function for function, _ in context.next_functions):
                return None
            if not any(context.needs_input_grad):
                return type(context).__name__.removesuffix("Backward")
    return ""
