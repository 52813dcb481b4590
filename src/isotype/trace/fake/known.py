"""Finds failures that do not depend on the weights: an index out of range, or a NaN that follows from known values."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from isotype.compat.torch import FakeTensor, operator_packet, version_of, without_functions, without_modes
from isotype.precision.devices.simulated import VALUE
from isotype.records.trace import Call
from isotype.trace.fake.values import LIMIT, Values
from isotype.trace.operator_call import OperatorCall

aten = torch.ops.aten

_MOST = 1 << 20
"""Maximum number of elements of a tensor whose masked positions are tracked."""
_INTEGERS = "_isotype_integers"
_MASKED = "_isotype_masked"
_NAN = "_isotype_nan"
_SAME = frozenset({aten.clone, aten._to_copy, aten.detach, aten.alias, aten.native_dropout, aten.sub})
"""Operators that compute each element of the first result from the element at the same position of the first operand."""
_SCALED = frozenset({aten.mul, aten.div, aten.mul_, aten.div_})
_MOVED = frozenset(
    {
        aten.view, aten._unsafe_view, aten.expand, aten.transpose, aten.permute, aten.t, aten.unsqueeze, aten.squeeze,
        aten.slice, aten.select,
    }
)  # fmt: skip
"""Operators that only move or select elements of the first operand."""
_FILLS = frozenset({aten.masked_fill, aten.masked_fill_})
_CLEARS = frozenset({*_FILLS, aten.where, aten.nan_to_num, aten.nan_to_num_})
"""Operators that code uses to replace NaN."""
_MEAN = 1
_ADDS = frozenset({aten.add, aten.add_, aten.baddbmm, aten.addmm})
_LOSSES = frozenset({aten.nll_loss_forward, aten.nll_loss2d_forward})
_SELECTIONS = frozenset({aten.gather, aten.index_select})
_SOFTMAX = frozenset({aten._softmax, aten._log_softmax})
_ALWAYS = frozenset({aten.embedding, aten.index, *_LOSSES, *_SELECTIONS, *_SOFTMAX, *_CLEARS})
"""Operators that are tracked for all operands, because they read a table, compute a softmax, or replace NaN."""
_IF_KNOWN = frozenset({*_MOVED, *_SAME, *_SCALED, *_ADDS})
"""Operators that are tracked only if values of an operand are known (`_is_noted`)."""


class Known:
    """Tracks integers and masked positions in a step on fake tensors. `values`: the known values of the step's tensors."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def give(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Store the value of an integer tensor, an input of the step, if the tensor is too large for `Values`."""
        if value.numel() > LIMIT and value.dtype in (torch.int64, torch.int32):
            setattr(tensor, _INTEGERS, value)

    def decide(self, call: OperatorCall, result: Any, calls: list[Call]) -> dict[str, Any]:
        """Return the fields `outside` and `undefined` of the operator's `Call`; fields with their default are left out.

        If the operator replaces NaN in the result of an earlier call, the earlier call gets `undefined=0`.
        """
        packet, args = operator_packet(call.func), call.args
        if packet not in _ALWAYS and not (packet in _IF_KNOWN and any(map(_is_noted, args[:2]))):
            return {}
        with without_functions(), without_modes():
            for arg in args if packet in _CLEARS else ():
                if hasattr(arg, _NAN):
                    at = getattr(arg, _NAN)
                    calls[at] = replace(calls[at], undefined=0)
            self._propagate(packet, call, result)
            outside = next(self._outside(packet, args), None)
            undefined = self._undefined(packet, args)
        if undefined:
            setattr(result if isinstance(result, torch.Tensor) else result[0], _NAN, len(calls))
        fields = {"outside": outside, "undefined": undefined}
        return {name: value for name, value in fields.items() if value}

    def _propagate(self, packet: Any, call: OperatorCall, result: Any) -> None:
        """Copy the known integers, masked positions or NaN of an operator's first operand to its result."""
        args, first = call.args, call.args[0]
        output = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(output, torch.Tensor) or output.numel() > max(_MOST, first.numel()):
            return
        masked = self._masked_by(packet, args, output)
        if masked is not None:
            setattr(output, _MASKED, (masked, (version_of(output) or 0) + (output is first)))
        if packet not in _MOVED and packet not in _SAME and packet not in _SCALED:
            return
        if hasattr(first, _NAN):
            setattr(output, _NAN, getattr(first, _NAN))
        kept = {_INTEGERS: getattr(first, _INTEGERS, None), _MASKED: self._masked(first)}
        for name, value in kept.items():
            moved = call.func(value, *args[1:]) if value is not None and packet in _MOVED else value
            if moved is None or (
                packet in _SCALED and (name == _INTEGERS or not 0 < (self._number(args[1]) or 0) < math.inf)
            ):
                continue
            setattr(output, name, (moved, version_of(output) or 0) if name == _MASKED else moved)

    def _masked_by(self, packet: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        """Return a mask of the positions in `output` where an operator writes minus infinity; None for other operators."""
        if packet in _FILLS:
            mask, value, before = self._values.of(args[1]), self._number(args[2]), self._masked(args[0])
            if mask is None or value is None:
                return None
            if value == -math.inf:
                return (mask | before if before is not None else mask).expand(output.shape)
            return None if before is None else before & ~mask
        if packet in _ADDS:
            parts = [self._masked(arg) for arg in args[: 2 if packet in (aten.add, aten.add_) else 1]]
        elif packet is aten.where and len(args) == 3 and (chosen := self._values.of(args[0])) is not None:
            kept = [self._masked(arg) for arg in args[1:]]
            if all(part is None for part in kept):
                return None
            yes, no = (torch.zeros((), dtype=torch.bool) if part is None else part for part in kept)
            parts = [torch.where(chosen, yes, no)]
        else:
            return None
        known = [part for part in parts if part is not None]
        return (known[0] | known[-1]).expand(output.shape) if known else None

    def _masked(self, value: Any) -> torch.Tensor | None:
        """Return a mask of the positions where an operand is known to be minus infinity; None if no such position is known."""
        if not isinstance(value, torch.Tensor):
            number = self._number(value)
            return torch.ones((), dtype=torch.bool) if number == -math.inf else None
        if not value.is_floating_point():
            return None
        tracked: tuple[torch.Tensor | None, int] = getattr(value, _MASKED, (None, 0))
        if tracked[0] is not None and tracked[1] == (version_of(value) or 0):
            return tracked[0]
        known = self._values.of(value)
        # Not by `isneginf`, which has no kernel for float8.
        positions = None if known is None else known.float() == -math.inf
        return positions if positions is not None and bool(positions.any()) else None

    def _number(self, value: Any) -> float | None:
        if isinstance(value, torch.Tensor):
            known = self._values.of(value) if value.numel() == 1 else None
            return None if known is None else float(known)
        return float(value) if isinstance(value, (int, float)) else None

    # ------------------------------------------------------------------------------------------------- decisions

    def _outside(self, packet: Any, args: Any) -> Iterator[tuple[int, int]]:
        """Yield (index, table size) for each index that is too large for the operator's table."""
        for indices, size, lowest, ignored in _accesses(packet, args):
            numbers = self._integers(indices)
            if numbers is None or not numbers.numel() or numbers.dtype == torch.bool:
                continue
            least, most = (int(number) for number in torch.aminmax(numbers.long()))
            if lowest <= least and most < size:
                continue
            wrong = numbers[((numbers < lowest) | (numbers >= size)) & (numbers != ignored)]
            if wrong.numel():
                yield int(wrong.max() if int(wrong.max()) >= size else wrong.min()), size

    def _undefined(self, packet: Any, args: Any) -> int:
        """Return how many rows of a softmax are fully masked; for a loss without labels, 1 if it is a mean, -1 if a sum."""
        if packet in _SOFTMAX and args[0].dim():
            masked = self._masked(args[0])
            return 0 if masked is None else int(masked.all(args[1]).sum())
        if packet in _LOSSES and args[3]:
            labels = self._integers(args[1])
            empty = labels is not None and bool((labels == args[4]).all())
            return empty if args[3] == _MEAN else -empty
        return 0

    def _integers(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.is_floating_point():
            return None
        known = self._values.of(tensor)
        return getattr(tensor, _INTEGERS, None) if known is None else known


def _accesses(packet: Any, args: Any) -> Iterator[tuple[torch.Tensor, int, int, int | None]]:
    """Yield each access of a call to the table `args[0]`: (indices, size of the table, lowest index, ignored index)."""
    if packet is aten.embedding:
        yield args[1], args[0].shape[0], 0, None
    elif packet in _LOSSES:
        yield args[1], args[0].shape[min(1, args[0].dim() - 1)], 0, args[4]
    elif packet in _SELECTIONS and args[0].dim():
        yield args[2], args[0].shape[args[1]], 0, None
    elif packet is aten.index:
        for dim, index in enumerate(args[1]):
            if index is not None and index.dtype in (torch.int64, torch.int32):
                yield index, args[0].shape[dim], -args[0].shape[dim], None


_NOTES = frozenset({VALUE, _INTEGERS, _MASKED, _NAN})


def _is_noted(value: Any) -> bool:
    """Return whether an operand is minus infinity, a real tensor, or a fake tensor with an attribute in `_NOTES`."""
    if not isinstance(value, torch.Tensor):
        return bool(value == -math.inf)
    return not isinstance(value, FakeTensor) or not _NOTES.isdisjoint(value.__dict__)
