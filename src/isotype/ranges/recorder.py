"""Recorder of magnitudes: a dispatch mode for operators, hooks for modules and gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import nn

from isotype.compat.torch import (
    OpOverload,
    UncompiledMode,
    current_node,
    in_backward,
    last_node_number,
    node_number,
    tree_leaves,
    without_dispatch,
)
from isotype.core.names import named
from isotype.core.operators import is_view, leaves, operator_name, tensors_in
from isotype.core.source import asking_line, shown
from isotype.model.walk import kind_of
from isotype.precision.ranges import ModuleRange, OperatorRange, is_attention
from isotype.ranges.weights import (
    FILL,
    Magnitude,
    WeightRange,
    attached,
    flushed_shares,
    largest_rows,
    magnitude,
    pass_on,
    remember,
    rows_of,
    whole,
)

# Operators that move or create values without rounding.
_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "clone", "_to_copy", "copy_", "copy", "cat", "stack", "index_select", "gather", "index", "masked_select", "repeat",
        "roll", "flip", "constant_pad_nd", "slice_backward", "select_backward", "empty", "empty_like", "new_empty",
        "empty_strided", "new_empty_strided", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "zero_",
        "lift_fresh", "lift_fresh_copy", "contiguous", "slice_scatter", "select_scatter", "_reshape_copy",
    )
)  # fmt: skip
_SHAPES = frozenset({"aten.detach", "aten.alias", "aten.sym_size", "prim.device"})
_SAME_VALUES = frozenset({"aten.clone", "aten._to_copy", "aten.contiguous", "aten.flip", "aten.roll"})

Phase = Literal["forward", "backward"]


@dataclass(slots=True)
class _Operator:
    inputs: list[float]
    output: float
    flushed: tuple[float, float]
    source: str


@dataclass(slots=True)
class _Module:
    """Magnitudes of one module; `each`: of its output for each text or batch."""

    kind: str
    input: float = 0.0
    output: float = 0.0
    gradient: float = 0.0
    each: dict[int, float] = field(default_factory=dict)


class RangeRecorder(UncompiledMode):  # type: ignore[no-untyped-call]
    """Records the magnitudes of a running step.

    Attributes:
        phase: of the current operators.
        first: the first operator with finite operands and a non-finite result; "" if there is none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "forward"
        self.first = ""
        self._modules: dict[str, _Module] = {}
        self._operators: dict[tuple[str, str, int, Phase], _Operator] = {}
        self._frames: list[str] = []
        self._places: dict[int, tuple[str, Any]] = {}
        self._calls: Counter[tuple[str, str, Phase]] = Counter()
        self._rows = 0
        self._texts = 0
        self._paused = False

    # ------------------------------------------------------------------------------------------------ the step

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Record a forward and backward of `rows` texts; 0 records the batch as one."""
        self._rows, self.phase = rows, "forward"
        self._frames.clear()
        self._places.clear()
        self._calls.clear()
        with self:
            yield
        self._texts += rows or 1

    @contextmanager
    def again(self) -> Iterator[None]:
        """Skip operators inside that a backward recomputes: they were recorded in the forward."""
        before, self._paused = self._paused, in_backward() or self._paused
        try:
            yield
        finally:
            self._paused = before

    def watch(self, model: nn.Module, names: Mapping[int, str], inside: Collection[int] = ()) -> None:
        """Add hooks to the modules of `model`; `names` are their plain names by id, `inside` the ids of those
        in blocks.

        Outputs of embeddings outside of blocks require gradients, so that gradients reach all modules even if
        these weights are frozen; inside, a position table may decide which kernel runs.
        """
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks; its operators belong to the caller
            kind = {"linear4bit": "linear", "linear8bit": "linear"}.get(kind_of(module), kind_of(module))
            module.register_forward_pre_hook(
                self._entering(names[id(module)], kind), with_kwargs=True, prepend=True
            )
            module.register_forward_hook(self._leaving, always_call=True)
            if kind == "embedding" and id(module) not in inside:
                module.register_forward_hook(_give_gradient, prepend=True)

    def _entering(self, name: str, kind: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._frames.append(name)
            if self._paused:
                return
            known = self._modules.setdefault(name, _Module(kind))
            if known.kind == "other":
                known.kind = kind  # PEFT's wrapper came first; the layer in it has the same name
            for tensor in _floats((args, kwargs)):
                known.input = _larger(known.input, self._seen(tensor).value)

        return enter

    def _leaving(self, _: nn.Module, __: Any, output: Any) -> None:
        name = self._frames.pop()
        if self._paused:
            return
        known = self._modules[name]
        for tensor in _floats(output):
            known.output = _larger(known.output, self._seen(tensor).value)
            self._note_each(known, tensor)
            if tensor.requires_grad:
                tensor.register_hook(self._gradient(known))  # type: ignore[no-untyped-call]

    def _note_each(self, known: _Module, tensor: torch.Tensor) -> None:
        """Record the largest output of each text."""
        if not self._rows:
            values = [self._seen(tensor).value]
        elif tensor.ndim and tensor.shape[0] == self._rows and tensor.numel():
            with without_dispatch():
                values = largest_rows(tensor)
        else:
            return
        for position, value in enumerate(values):
            text = self._texts + position
            known.each[text] = _larger(known.each.get(text, 0.0), value)

    def _gradient(self, known: _Module) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            known.gradient = _larger(known.gradient, self._seen(gradient).value)

        return note

    def _seen(self, tensor: torch.Tensor) -> Magnitude:
        with without_dispatch():
            return magnitude(tensor)

    # ----------------------------------------------------------------------------------------------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        short = _short(func)
        if short == "aten.embedding":
            args = rows_of(args)
        elif short not in _SHAPES:
            args, kwargs = whole(args, kwargs)
        result = func(*args, **kwargs)
        if not self._paused:
            with without_dispatch():
                self._write(func, short, args, kwargs, result)
        return result

    def _write(self, func: Any, short: str, args: Any, kwargs: Any, result: Any) -> None:
        outputs = [each for each in leaves(result) if isinstance(each, torch.Tensor) and _is_float(each)]
        if not outputs:
            return
        if is_attention(short):
            outputs = outputs[:1]  # other outputs are statistics
        sources = [each for _, each in tensors_in(func, args, kwargs) if _is_float(each)]
        if short in _SAME_VALUES or (is_view(func) and sources and sources[0].numel() <= outputs[0].numel()):
            if len(sources) == len(outputs) == 1 and _width(outputs[0]) >= _width(sources[0]):
                pass_on(sources[0], outputs[0])
            return
        if is_view(func) or short in _MOVES:
            return
        operands = [magnitude(each) for each in sources]
        fills = any(each.filled for each in operands) or _is_fill(short, args, kwargs)
        output = 0.0
        for each in outputs:
            output = _larger(output, self._checked(each, operands, fills, func).value)
        module, source = self._place()
        index = self._calls[module, short, self.phase]
        self._calls[module, short, self.phase] += 1
        key = (module, operator_name(func), index, self.phase)
        flushed = _each_larger(map(flushed_shares, outputs))
        inputs = [each.value for each in operands]
        known = self._operators.get(key)
        if known is None:
            self._operators[key] = _Operator(inputs, output, flushed, shown(source))
        else:
            known.inputs = [_larger(*pair) for pair in zip_longest(known.inputs, inputs, fillvalue=0.0)]
            known.output, known.flushed = (
                _larger(known.output, output),
                _each_larger((known.flushed, flushed)),
            )

    def _checked(
        self, output: torch.Tensor, operands: Sequence[Magnitude], fills: bool, func: Any
    ) -> Magnitude:
        """Return the magnitude of a result; infinite if the operator overflowed, not for infinite operands."""
        size = magnitude(output)
        if size.filled and not fills:
            size = remember(output, Magnitude(math.inf))
        if not math.isfinite(size.value) and not self.first:
            module, source = self._place()
            sizes = ", ".join(f"{each.value:.4g}" for each in operands)
            at = f" ({shown(source)})" if source else ""
            self.first = (
                f"{operator_name(func)} in {named(module)}{at}, {self.phase}: operands up to {sizes or 'none'}, "
                f"result {'NaN' if math.isnan(size.value) else 'infinite'}"
            )
        return size

    def _place(self) -> tuple[str, Any]:
        """Return (module, line) of the current operator; in a backward, of its forward call."""
        node = current_node() if self.phase == "backward" else None
        if node is not None and not self._frames:
            return self._places.get(node_number(node), ("", None))
        place = (self._frames[-1] if self._frames else "", asking_line())
        if torch.is_grad_enabled():
            self._places.setdefault(last_node_number(), place)
        return place

    # -------------------------------------------------------------------------------------------------- result

    def operators(self) -> tuple[OperatorRange, ...]:
        """Return the recorded operators, in the order of their first call."""
        return tuple(
            OperatorRange(
                module,
                op,
                index,
                phase,
                tuple(seen.inputs),
                seen.output,
                seen.flushed[0],
                seen.source,
                seen.flushed[1],
            )
            for (module, op, index, phase), seen in self._operators.items()
        )

    def order(self) -> dict[str, int]:
        """Return the positions of the called modules in the order of their first call, by name."""
        return {name: position for position, name in enumerate(self._modules)}

    def kind(self, name: str) -> str:
        """Return the kind of a called module."""
        return self._modules[name].kind

    def modules(self, weights: Mapping[str, WeightRange]) -> tuple[ModuleRange, ...]:
        """Return the called modules in the order of their first call; `weights`: ranges of their parameters."""
        none = WeightRange()
        return tuple(
            ModuleRange(
                name,
                seen.kind,
                seen.input,
                seen.output,
                seen.gradient,
                weights.get(name, none).largest,
                weights.get(name, none).median,
                weights.get(name, none).gradient,
            )
            for name, seen in self._modules.items()
        )

    def spread(self) -> float:
        """Return the largest ratio of a module's outputs between two texts or batches; 1 for a single one."""
        ratios = [
            max(seen.each.values()) / min(seen.each.values())
            for seen in self._modules.values()
            if len(seen.each) == self._texts and min(seen.each.values()) > 0
        ]
        return max((ratio for ratio in ratios if math.isfinite(ratio)), default=1.0)


def _larger(one: float, other: float) -> float:
    """Return the larger of two magnitudes; NaN if one is NaN."""
    return other if other > one or math.isnan(other) else one


def _each_larger(shares: Iterable[tuple[float, float]]) -> tuple[float, float]:
    plain, scaled = zip(*shares, strict=True)
    return max(plain), max(scaled)


def _floats(value: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and _is_float(each))


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point


def _width(tensor: torch.Tensor) -> int:
    return tensor.dtype.itemsize


def _give_gradient(_: nn.Module, __: Any, output: Any) -> Any:
    wanted = isinstance(output, torch.Tensor) and _is_float(output) and not output.requires_grad
    return attached(output) if wanted and torch.is_grad_enabled() else None


@cache
def _short(func: Any) -> str:
    """Return `aten.mm` for `aten.mm.default`."""
    return operator_name(func).rpartition(".")[0]


def _is_fill(short: str, args: Any, kwargs: Any) -> bool:
    """Return whether infinity in a result was intended: by a number among the arguments, or as log(0)."""
    numbers = (each for each in (*args, *kwargs.values()) if type(each) is float)
    return short == "aten.log" or any(abs(number) >= FILL for number in numbers)
