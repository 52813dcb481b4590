"""The recorder: a dispatch mode that records every operator of a step, with the dtype paths of its operands.

It sees operators below autograd, so forward, backward and optimizer look alike; a backward operator is
matched to its forward call by autograd's sequence number. `trace.fake.recorder` runs a step on fake tensors,
`trace.live` watches a real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import (
    FakeTensor,
    UncompiledMode,
    current_node,
    last_node_number,
    node_number,
    tree_leaves,
)
from isotype.core.operators import leaves, numbers_in, operator_name
from isotype.core.source import asking_line, shown
from isotype.model.fold import repeats_of
from isotype.model.walk import listening, plain_tensors
from isotype.records.memory import MemoryKind, Phase
from isotype.records.trace import CASTS, FLOATS, Breach, Call, Operand, Origin
from isotype.trace.flops import flops_of
from isotype.trace.ledger import Ledger
from isotype.trace.taken import DtypeReads

aten = torch.ops.aten

ORIGIN = "_isotype_origin"
"""Attribute of a tensor with the origin of its dtype."""

# Node class of a `torch.autograd.Function`.
_WRITTEN: Any = torch.autograd.function.BackwardCFunction

_UNSET = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
_KEPT_OUTSIDE = "a tensor that the code keeps outside of the model"

# Python names of casts such as `.to(dtype)`; a cast in any other function is autocast's.
_CAST_FUNCTIONS = frozenset(
    {"to", "float", "half", "bfloat16", "double", "type", "type_as", "copy_", "_to_copy"}
)
# These create a real tensor first, which the dispatcher then lifts to a fake.
_FACTORIES = frozenset({"tensor", "as_tensor", "from_numpy", "asarray", "new_tensor"})
# Functions that take the dtype of another tensor -> its argument position.
_TAKE_FROM = {"to": 1, "type_as": 1, "new_tensor": 0}


@dataclass(slots=True)
class Place:
    """The place of an operator: module, source, and the number of calls of the real step it represents."""

    module: str
    source: Any
    repeats: int
    breached: bool = False
    backward: dict[Any, Place] = field(default_factory=dict)

    def written_at(self, source: Any) -> Place:
        """Return the place of a line in a written backward (`torch.autograd.Function`)."""
        if source is None:
            return self  # called by torch's own code (checkpointing)
        return self.backward.setdefault(source, Place(self.module, source, self.repeats))


@dataclass
class _Frame:
    """A module whose forward is running."""

    name: str
    repeats: int
    entered: int
    returns: Origin | None = None


_CHECKPOINTS = "_gradient_checkpointing_func"
"""Attribute of transformers' layers with their checkpointing function."""


class _Recomputed:
    """Tracks a checkpointed transformers (5.23) layer, whose hooks do not run in recomputation."""

    def __init__(
        self, recorder: Recorder, module: nn.Module, checkpoint: Any, name: str, repeats: int
    ) -> None:
        self._module, self._checkpoint = module, checkpoint

        def following(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def followed(*args: Any, **kwargs: Any) -> Any:
                if recorder.phase != "backward" or recorder.module == name:
                    return function(*args, **kwargs)
                recorder.enter(name, repeats)
                try:
                    return function(*args, **kwargs)
                finally:
                    recorder.leave()

            return checkpoint(followed, *args, **kwargs)

        setattr(module, _CHECKPOINTS, following)

    def remove(self) -> None:
        setattr(self._module, _CHECKPOINTS, self._checkpoint)


class Recorder(UncompiledMode):  # type: ignore[no-untyped-call]
    """State of a running step for any kind of tensors; subclasses implement `__torch_dispatch__`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "forward"
        self.calls: list[Call] = []
        self.ledger = Ledger()
        self.function = ""
        # Autocast's dtype where Python called the function: inside autocast's kernels it is off.
        self.autocast: torch.dtype | None = None
        self.reads = DtypeReads()
        # Origin of the function's dtype argument, if it is another tensor's.
        self.like: Origin | None = None
        self.names: dict[int, Origin] = {}
        # Float dtypes of the step's inputs.
        self.inputs: set[torch.dtype] = set()
        # Module name -> its own parameters and buffers, as the ledger has them.
        self.held: dict[str, list[tuple[torch.Tensor, MemoryKind, int, int | None]]] = {}
        self._frames: list[_Frame] = []
        self._places: dict[int, Place] = {}
        self._alive: list[Any] = []
        self._raised_in: _Frame | None = None

    # -------------------------------------------------------------------------------------------------- modules

    def watch(self, model: nn.Module) -> list[Any]:
        """Add hooks to the modules of `model` and register its parameters and buffers; return the handles."""
        handles: list[Any] = []
        # By name: a recomputation may enter a module without its parents.
        standing = repeats_of(model)
        for name, module in model.named_modules(remove_duplicate=True):
            repeats = standing[name]
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks; its operators are its caller's
            # bitsandbytes' layers cast their output to their input's dtype.
            casts_back = type(module).__module__.startswith("bitsandbytes.")
            enter = self._entering(name, repeats, casts_back)
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(self._leaving, always_call=True, with_kwargs=True))
            if (recomputing := module.__dict__.get(_CHECKPOINTS)) is not None:
                handles.append(_Recomputed(self, module, recomputing, name, repeats))
        for name, parameter in model.named_parameters():
            self._own(parameter, Origin("parameter", parameter.dtype, name))
        for name, buffer in model.named_buffers():
            self._own(buffer, Origin("buffer", buffer.dtype, name))
        return handles

    def _own(self, tensor: torch.Tensor, origin: Origin) -> None:
        self.names[id(tensor)] = origin
        self._alive.append(tensor)

    def _own_plain_tensors(self, model: nn.Module, prefix: str = "") -> None:
        """Register the tensors that modules have as plain attributes, unless known as something else."""
        for module_name, module in model.named_modules():
            for name, tensor in plain_tensors(module):
                if id(tensor) not in self.names:
                    full = f"{module_name}.{name}" if module_name else name
                    self._own(tensor, Origin("attribute", tensor.dtype, f"{prefix}{full}"))

    def _entering(self, name: str, repeats: int, casts_back: bool) -> Callable[..., None]:
        def enter(_: nn.Module, args: Any) -> None:
            first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
            known = self.origin(first) if casts_back and first is not None else None
            self.enter(name, repeats, known)

        return listening(enter)

    def enter(self, name: str, repeats: int = 1, returns: Origin | None = None) -> None:
        """Enter a module's forward, which represents `repeats`; casts to the dtype of `returns` have that origin."""
        self._frames.append(_Frame(name, repeats, self.ledger.mark(), returns))

    @listening
    def _leaving(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.leave((args, kwargs), output)

    def leave(self, arguments: Any = (), output: Any = None) -> None:
        """Leave the innermost module, called with `arguments` and returning `output`."""
        if not self._frames:
            return
        frame = self._frames.pop()
        # Hooks also run during an exception; the first one knows its origin.
        self._raised_in = (self._raised_in or frame) if sys.exc_info()[1] is not None else None
        for tensor, kind, repeats, held in self.held.get(frame.name, ()):
            self.ledger.seen(tensor, kind, repeats, held)  # its memory may have changed (`weight.data = …`)
        outer = self._frames[-1].repeats if self._frames else 1
        if frame.repeats != outer and self.phase == "forward" and torch.is_grad_enabled():
            inputs, outputs = (
                [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]
                for tree in (arguments, output)
            )
            self.ledger.multiply(frame.name, frame.entered, frame.repeats // outer, inputs, outputs)

    @property
    def module(self) -> str:
        """The innermost module with a running forward."""
        return self._frames[-1].name if self._frames else ""

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Set the phase of operators inside."""
        before, self.phase = self.phase, phase
        self._frames.clear()
        self.ledger.begin(phase)
        try:
            yield
        finally:
            self.phase = before

    # ---------------------------------------------------------------------------------------------- provenance

    def origin(self, tensor: torch.Tensor) -> Origin:
        """Return the origin of `tensor`'s dtype."""
        known = self.names.get(id(tensor))
        if known is None or known.dtype != tensor.dtype:  # a parameter cast by the forward itself
            known = getattr(tensor, ORIGIN, known)
        if known is None:
            known = self._unknown(tensor)
            self.mark(tensor, known)
        return known

    def _unknown(self, tensor: torch.Tensor) -> Origin:
        """Return the origin of a tensor that was not made in the step: a number, or one kept by the code."""
        source = shown(asking_line())
        if not tensor.shape or isinstance(tensor, FakeTensor) or self.function in _FACTORIES:
            function, like = self._function_name("a tensor"), self._like(tensor.dtype)
            return Origin("constant", tensor.dtype, function, self.module, source, like=like)
        if _is_borrowed(tensor):
            return Origin("constant", tensor.dtype, "NumPy", self.module, source)
        return Origin("outside", tensor.dtype, _KEPT_OUTSIDE, self.module, source)

    def mark(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Set the origin of `tensor`'s dtype."""
        if origin.kind == "input" and origin.dtype in FLOATS:
            self.inputs.add(origin.dtype)
        setattr(tensor, ORIGIN, origin)

    def cast_origin(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin | None:
        """Return the origin of the dtype of a cast or new tensor if it is read from another tensor; None if
        the code names it.

        Call it where Python calls the function.
        """
        if name in _TAKE_FROM:
            like = kwargs.get("other", next(iter(args[_TAKE_FROM[name] :]), None))
            if isinstance(like, torch.Tensor) and kwargs.get("dtype") is None:
                return self.origin(like)
        dtype = kwargs.get("dtype") or next((each for each in args if isinstance(each, torch.dtype)), None)
        return self.reads.taken_by(dtype) if isinstance(dtype, torch.dtype) else self.like

    def _like(self, dtype: torch.dtype) -> Origin | None:
        return self.like if self.like is not None and self.like.dtype == dtype else None

    def operands(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[Operand, ...]:
        """Return tensors with roles as operands, with the origins of their dtypes."""
        return tuple(
            Operand(role, tensor.dtype, tuple(tensor.shape), self.origin(tensor)) for role, tensor in tensors
        )

    @property
    def _recomputing(self) -> bool:
        return self.phase == "backward" and bool(self._frames)

    def note(self, name: str, tensors: Sequence[tuple[str, torch.Tensor]], breach: Breach) -> None:
        """Record a function that was or would be refused before any operator."""
        self._append(name, self._place(), self.operands(tensors), breach)

    def _append(
        self,
        name: str,
        place: Place,
        operands: tuple[Operand, ...],
        breach: Breach | None,
        outputs: Sequence[torch.Tensor] = (),
        flops: int = 0,
        numbers: tuple[tuple[str, float], ...] = (),
    ) -> None:
        self.calls.append(
            Call(
                name,
                self.phase,
                place.module,
                shown(place.source),
                operands,
                tuple((tensor.dtype, tuple(tensor.shape)) for tensor in outputs),
                flops,
                place.repeats,
                breach,
                self._recomputing,
                self.autocast,
                numbers=numbers,
            )
        )

    def _write(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[tuple[str, torch.Tensor]],
        result: Any,
        place: Place,
        breach: Breach | None,
    ) -> None:
        name = operator_name(func)
        operands = self.operands(tensors)
        outputs = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in outputs:
            if not any(tensor is operand for _, operand in tensors):
                origin = self._origin_of(name, tensor, operands, kwargs, place, breach)
                self.mark(tensor, origin)
            elif name == "aten.copy_.default" and _is_anothers_scratch(operands, place):
                made_by = operands[0].origin
                self.mark(tensor, Origin("scratch", tensor.dtype, made_by.module, source=made_by.source))
            self.ledger.seen(tensor)
        if name == "aten._safe_softmax.default":  # it saves for every score, in a byte, whether it is -inf
            for size in (outputs[0].numel(), -outputs[0].numel()):
                self.ledger.add("activations", size)
        if breach is not None:
            if place.breached and self.phase == "backward" and not self._recomputing:
                breach = replace(breach, consequence=True)
            place.breached = True
        flops = flops_of(func, args, kwargs, result) if outputs else 0
        self._append(name, place, operands, breach, outputs, flops, numbers_in(func, args, kwargs))

    def _origin_of(
        self,
        name: str,
        tensor: torch.Tensor,
        operands: Sequence[Operand],
        kwargs: Any,
        place: Place,
        breach: Breach | None,
    ) -> Origin:
        dtype, source = tensor.dtype, place.source
        if breach is not None:
            return Origin("conversion", dtype, name, place.module, shown(source))
        if name in CASTS or kwargs.get("dtype") is not None:
            if operands and operands[-1].dtype == dtype and name in CASTS:
                return operands[-1].origin
            returns = self._frames[-1].returns if self._frames else None
            if returns is not None and returns.dtype == dtype:
                return returns
            before = operands[0].origin if operands else None
            if before is not None and before.kind == "gradient":
                before = before.before  # a gradient is cast in every layer: keep one step
            kind: Any = self._cast_kind() if operands else "constant"
            like = self._like(dtype) if kind in ("cast", "constant") else None
            return Origin(kind, dtype, self._function_name(name), place.module, shown(source), before, like)
        if "dequantize" in name and operands and operands[0].origin.kind == "parameter":
            layer = operands[0].origin.name.rpartition(".")[0]
            return Origin("state", dtype, layer, place.module, shown(source))
        alike = [operand for operand in operands if operand.dtype == dtype]
        # A 0-dim tensor takes no part in promotion, unless there are only such.
        winner = min([operand for operand in alike if operand.shape] or alike, key=_tells, default=None)
        if winner is None:
            before = operands[0].origin if operands else None
            kind = "operator" if operands else "constant"
            return Origin(kind, dtype, self._function_name(name), place.module, shown(source), before)
        floats = {operand.dtype for operand in operands if operand.dtype in FLOATS and operand.shape}
        promoted = len(floats) > 1 and dtype == max(floats, key=width)
        if promoted and dtype in FLOATS and winner.origin.kind != "promotion":
            return Origin(
                "promotion", dtype, self._function_name(name), place.module, shown(source), winner.origin
            )
        return winner.origin

    def _cast_kind(self) -> Any:
        if self.phase == "backward" and not self._frames and self.function not in _CAST_FUNCTIONS:
            return "gradient"
        by_autocast = self.autocast is not None and self.function not in _CAST_FUNCTIONS
        return "autocast" if by_autocast else "cast"

    def _function_name(self, name: str) -> str:
        return self.function or name

    # ---------------------------------------------------------------------------------------------------- place

    def _place(self) -> Place:
        """Return the place of the current operator; in a backward, of its forward call."""
        node = current_node() if self.phase == "backward" else None
        if node is not None and not self._frames:
            known = self._places.get(node_number(node))
            if known is not None:
                self.ledger.backward_in(known.module)
                return known.written_at(asking_line()) if isinstance(node, _WRITTEN) else known
            return Place("", asking_line(), 1)
        frame = self._frames[-1] if self._frames else None
        place = Place(frame.name if frame else "", asking_line(), frame.repeats if frame else 1)
        if self.phase == "forward" or (self.phase == "backward" and torch.is_grad_enabled()):
            self._places.setdefault(last_node_number(), place)
        return place


# ------------------------------------------------------------------------------------------------------- helpers


def _is_borrowed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory was not allocated by torch, as with `torch.from_numpy`."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return plain and not tensor.untyped_storage().resizable()


def _is_anothers_scratch(operands: Sequence[Operand], place: Place) -> bool:
    """Return whether a copy changes the dtype in uninitialized memory allocated by another module."""
    into, value = operands[:2]
    made_by = into.origin
    unset = made_by.kind == "constant" and made_by.name in _UNSET
    return unset and into.dtype != value.dtype and bool(made_by.module) and made_by.module != place.module


def _tells(operand: Operand) -> int:
    """Return the rank of an operand as the source of a dtype; lower is more informative.

    An empty or filled tensor has its dtype from Python code, a gradient that of the forward's value, so other
    operands rank above them. An input of the step ranks below a weight of the same dtype, since it needs that
    dtype there.
    """
    kinds = {step.kind for step in operand.origin.path()}
    cause = operand.origin.cause.kind
    return 3 if cause == "constant" else 2 if "gradient" in kinds else 1 if cause == "input" else 0


def width(dtype: torch.dtype) -> int:
    return dtype.itemsize
