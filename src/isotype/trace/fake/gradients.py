"""Trainable parameters reached by a step's gradients, and those used only with gradients off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from isotype.compat.standard import frame_above
from isotype.core.source import shown
from isotype.records.reach import Unreached
from isotype.records.trace import Origin
from isotype.trace.recorder import Place

aten = torch.ops.aten

# Operators that only pass on a tensor without history: no use of its values.
_CUTS = frozenset({aten.detach.default, aten.alias.default})
# Autocast always casts weights with gradients on: the use is that of the result.
_CAST = aten._to_copy.default

_PARAMETER = "_isotype_parameter"
"""Attribute of a parameter's cast with the parameter's id."""


class Gradients:
    """Tracks the trainable parameters of one step.

    Attributes:
        reached: ids of those with an accumulated gradient.
        behind: modules that returned with gradients on, in order.
    """

    def __init__(self) -> None:
        self.reached: set[int] = set()
        self.behind: list[str] = []
        self._used: dict[int, Unreached] = {}
        self._off: dict[int, Unreached] = {}

    def used(
        self,
        func: Any,
        tensors: Sequence[tuple[str, torch.Tensor]],
        result: Any,
        names: Mapping[int, Origin],
        place: Place,
    ) -> None:
        """Record an operator of the forward with operands `tensors`; `names` has the parameters by id."""
        if func in _CUTS:
            return
        for _, tensor in tensors:
            cast_of = getattr(tensor, _PARAMETER, None)  # with a history or, in torch 2.10, without
            key = id(tensor) if cast_of is None else cast_of
            known = names.get(key)
            trainable = cast_of is not None or tensor.requires_grad
            if known is None or known.kind != "parameter" or not trainable:
                continue
            if func is _CAST:
                setattr(result, _PARAMETER, key)
                continue
            function = None if torch.is_grad_enabled() else _function()
            taken = self._used if function is None else self._off
            if key not in taken:
                where = (place.module, shown(place.source))
                taken[key] = Unreached(
                    known.name, *where, function or "", tuple(self.behind), function is None
                )

    def unreached(self) -> Iterator[Unreached]:
        """Yield the parameters that were used and got no gradient, after the backward."""
        for key, unreached in {**self._off, **self._used}.items():
            if key not in self.reached:
                yield unreached


def _function() -> str | None:
    """Return the name of the `torch.autograd.Function` running its forward without gradients; "" under
    `torch.no_grad()`.

    Reentrant gradient checkpointing is such a function if no input requires a gradient. None inside a
    function that computes its inputs' gradients itself, such as a fused layer, unless under
    `torch.no_grad()`.
    """
    frame: Any = frame_above(2)
    while frame is not None:
        first = next(iter(frame.f_code.co_varnames), "")
        context = frame.f_locals.get(first) if frame.f_code.co_name == "forward" else None
        if isinstance(context, torch.autograd.function.BackwardCFunction):
            if any(function for function, _ in context.next_functions):
                return None
            if not any(context.needs_input_grad):
                return type(context).__name__.removesuffix("Backward")
        frame = frame.f_back
    return ""
