"""Records the magnitudes of a running step with a dispatch mode for operators, and hooks for modules and gradients."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
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
    run_in_mode,
    without_dispatch,
)
from isotype.core.names import named
from isotype.core.operators import is_view, leaves, operator_name, tensors_in, tensors_of
from isotype.core.source import asking_line, shown
from isotype.model.walk import kind_of
from isotype.precision.ranges import ModuleRange, OperatorRange, has_statistics
from isotype.ranges.weights import FILL, Magnitude, flushed_shares, give_gradient, largest_rows, with_values

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
class _Module:
    """Magnitudes of one module. `outputs`: index of the text or batch -> magnitude of the module's output."""

    kind: str
    input: float = 0.0
    output: float = 0.0
    gradient: float = 0.0
    outputs: dict[int, float] = field(default_factory=dict)


class RangeRecorder(UncompiledMode):  # type: ignore[no-untyped-call]
    """Records the magnitudes of a running step.

    Attributes:
        first: the first operator with finite operands and a non-finite result; "" if there is none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "forward"
        self.first = ""
        self._modules: dict[str, _Module] = {}
        self._operators: dict[tuple[str, str, int, Phase], OperatorRange] = {}
        self._frames: list[str] = []
        self._places: dict[int, tuple[str, Any]] = {}
        self._calls: Counter[tuple[str, str, Phase]] = Counter()
        self._rows = 0
        self._texts = 0
        self._paused = False

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Record the step in the `with` block. The batch has `rows` texts. If `rows` is 0, the batch counts as one text."""
        self._rows, self.phase = rows, "forward"
        self._frames.clear()
        self._places.clear()
        self._calls.clear()
        with self:
            yield
        self._texts += rows or 1

    @contextmanager
    def again(self) -> Iterator[None]:
        """In the `with` block, do not record operators that a backward recomputes, because they were recorded in the forward."""
        before, self._paused = self._paused, in_backward() or self._paused
        try:
            yield
        finally:
            self._paused = before

    def watch(self, model: nn.Module, names: Mapping[int, str], inside: Collection[int] = ()) -> None:
        """Add hooks to the modules of `model`. `names`: module's id -> plain name; `inside`: ids of the modules in blocks.

        Outputs of embeddings outside of blocks require gradients, so that gradients are computed for all modules. An
        embedding in a block may be a position table. If the output of a position table required gradients, attention
        might choose another kernel.
        """
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks; its operators belong to the caller
            kind = {"linear4bit": "linear", "linear8bit": "linear"}.get(kind_of(module), kind_of(module))
            entering = partial(self._entering, names[id(module)], kind)
            module.register_forward_pre_hook(entering, with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leaving, always_call=True)
            if kind == "embedding" and id(module) not in inside:
                module.register_forward_hook(give_gradient, prepend=True)

    def _entering(self, name: str, kind: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._frames.append(name)
        if self._paused:
            return
        sizes = self._modules.setdefault(name, _Module(kind))
        if sizes.kind == "other":
            sizes.kind = kind  # PEFT's wrapper ran first; the layer inside the wrapper has the same name
        for tensor in _floats((args, kwargs)):
            sizes.input = _larger(sizes.input, _undispatched(tensor))

    def _leaving(self, _: nn.Module, __: Any, output: Any) -> None:
        name = self._frames.pop()
        if self._paused:
            return
        sizes = self._modules[name]
        for tensor in _floats(output):
            sizes.output = _larger(sizes.output, _undispatched(tensor))
            self._note_texts(sizes, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(_note_gradient, sizes))  # type: ignore[no-untyped-call]

    def _note_texts(self, sizes: _Module, output: torch.Tensor) -> None:
        if not self._rows:
            values = [_undispatched(output)]
        elif output.ndim and output.shape[0] == self._rows and output.numel():
            with without_dispatch():
                values = largest_rows(output)
        else:
            return
        for text, value in enumerate(values, self._texts):
            sizes.outputs[text] = _larger(sizes.outputs.get(text, 0.0), value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return run_in_mode(func, args, kwargs)
        short = _short(func)
        if short not in _SHAPES:
            args, kwargs = with_values(short, args, kwargs)
        result = run_in_mode(func, args, kwargs)
        if not self._paused:
            with without_dispatch():
                self._write(func, short, args, kwargs, result)
        return result

    def _write(self, func: Any, short: str, args: Any, kwargs: Any, result: Any) -> None:
        outputs = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor) and _is_float(leaf)]
        if not outputs:
            return
        if has_statistics(short):
            outputs = outputs[:1]
        sources = [tensor for _, tensor in tensors_in(func, args, kwargs) if _is_float(tensor)]
        if short in _SAME_VALUES or (is_view(func) and sources and sources[0].numel() <= outputs[0].numel()):
            exact = len(sources) == len(outputs) == 1 and outputs[0].itemsize >= sources[0].itemsize
            if exact and (known := Magnitude.cached(sources[0])):
                known.remember(outputs[0])
            return
        if is_view(func) or short in _MOVES:
            return
        operands = [Magnitude.of(tensor) for tensor in sources]
        # An infinity in the result is intended if it is an argument of the operator or log(0).
        numbers = (abs(value) for value in (*args, *kwargs.values()) if type(value) is float)
        fills = (
            any(operand.filled for operand in operands)
            or short == "aten.log"
            or any(n >= FILL for n in numbers)
        )
        output = 0.0
        for tensor in outputs:
            output = _larger(output, self._checked(tensor, operands, fills, func).value)
        module, source = self._place()
        index = self._calls[module, short, self.phase]
        self._calls[module, short, self.phase] += 1
        key = (module, operator_name(func), index, self.phase)
        inputs: Iterable[float] = (operand.value for operand in operands)
        shares, line = [*map(flushed_shares, outputs)], shown(source)
        if (earlier := self._operators.get(key)) is not None:
            inputs = (_larger(*pair) for pair in zip_longest(earlier.inputs, inputs, fillvalue=0.0))
            output, line = _larger(earlier.output, output), earlier.source
            shares.append((earlier.flushed, earlier.flushed_scaled))
        plain, scaled = map(max, zip(*shares, strict=True))
        self._operators[key] = OperatorRange(*key, tuple(inputs), output, plain, line, scaled)

    def _checked(
        self, output: torch.Tensor, operands: Sequence[Magnitude], fills: bool, func: Any
    ) -> Magnitude:
        """Return the magnitude of a result. It is infinity if it exceeds 1e38 and no operand has fill values."""
        size = Magnitude.of(output)
        if size.filled and not fills:
            size = Magnitude(math.inf).remember(output)
        if not math.isfinite(size.value) and not self.first:
            module, source = self._place()
            sizes = ", ".join(f"{operand.value:.4g}" for operand in operands)
            at = f" ({shown(source)})" if source else ""
            self.first = (
                f"{operator_name(func)} in {named(module)}{at}, {self.phase}: operands up to {sizes or 'none'}, "
                f"result {'NaN' if math.isnan(size.value) else 'infinite'}"
            )
        return size

    def _place(self) -> tuple[str, Any]:
        """Return (module, line) of the current operator; in a backward, the module and line of the forward operator."""
        node = current_node() if self.phase == "backward" else None
        if node is not None and not self._frames:
            return self._places.get(node_number(node), ("", None))
        place = (self._frames[-1] if self._frames else "", asking_line())
        if torch.is_grad_enabled():
            self._places.setdefault(last_node_number(), place)
        return place

    def operators(self) -> tuple[OperatorRange, ...]:
        """Return the recorded operators, in the order of their first call."""
        return tuple(self._operators.values())

    def order(self) -> dict[str, int]:
        """Return the position of each called module in the order of the first calls, by name."""
        return {name: position for position, name in enumerate(self._modules)}

    def kind(self, name: str) -> str:
        return self._modules[name].kind

    def module_ranges(self, weights: Mapping[str, tuple[float, float, float]]) -> tuple[ModuleRange, ...]:
        """Return the called modules in the order of their first call. `weights` is from `Twin.weight_ranges`."""
        return tuple(
            ModuleRange(name, m.kind, m.input, m.output, m.gradient, *weights.get(name, (0.0, 0.0, 0.0)))
            for name, m in self._modules.items()
        )

    def spread(self) -> float:
        """Return the largest ratio of the output magnitudes of a module in two texts or batches; 1 for a single text."""
        outputs = [m.outputs.values() for m in self._modules.values() if len(m.outputs) == self._texts]
        ratios = [max(values) / min(values) for values in outputs if min(values) > 0]
        return max((ratio for ratio in ratios if math.isfinite(ratio)), default=1.0)


def _undispatched(tensor: torch.Tensor) -> float:
    with without_dispatch():
        return Magnitude.of(tensor).value


def _note_gradient(sizes: _Module, gradient: torch.Tensor) -> None:
    sizes.gradient = _larger(sizes.gradient, _undispatched(gradient))


def _larger(size: float, other: float) -> float:
    return other if other > size or math.isnan(other) else size


def _floats(value: Any) -> Iterator[torch.Tensor]:
    return filter(_is_float, tensors_of(value))


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point


@cache
def _short(func: Any) -> str:
    return operator_name(func).rpartition(".")[0]
