"""The recorder: a dispatch mode that writes down every operator of a step, with the dtype path of its operands.

It sees operators below autograd, so forward, backward and optimizer look alike; a backward operator finds the forward
call it belongs to by the sequence number that autograd gives both. `fake_recorder` runs a step on fake tensors, `live`
watches a real one.
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
"""Name of the attribute in which a tensor keeps who made its dtype."""

# The node of a `torch.autograd.Function`.
_WRITTEN: Any = torch.autograd.function.BackwardCFunction

_UNSET = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
_KEPT_OUTSIDE = "a tensor that the code keeps outside of the model"

# What `.to(dtype)` and its kind are called where Python calls them; any other function that casts was autocast.
_CAST_FUNCTIONS = frozenset(
    {"to", "float", "half", "bfloat16", "double", "type", "type_as", "copy_", "_to_copy"}
)
# These make a real tensor first, which the dispatcher then lifts into the fakes.
_FACTORIES = frozenset({"tensor", "as_tensor", "from_numpy", "asarray", "new_tensor"})
# Take the dtype of another tensor: the argument that it is.
_TAKE_FROM = {"to": 1, "type_as": 1, "new_tensor": 0}


@dataclass(slots=True)
class Place:
    """Where an operator runs: module, source, and how many calls of the real step it stands for."""

    module: str
    source: Any
    repeats: int
    breached: bool = False
    backward: dict[Any, Place] = field(default_factory=dict)

    def written_at(self, source: Any) -> Place:
        """The place of a line of a backward that is written out (`torch.autograd.Function`), not derived by autograd."""
        if source is None:
            return self  # torch's own code (checkpointing) asked
        return self.backward.setdefault(source, Place(self.module, source, self.repeats))


@dataclass
class _Frame:
    """A module whose forward is running."""

    name: str
    repeats: int
    entered: int
    returns: Origin | None = None


_CHECKPOINTS = "_gradient_checkpointing_func"
"""Where transformers' layers hold the function that checkpoints them."""


class _Recomputed:
    """Follows a layer of transformers (5.23) that is checkpointed, whose hooks do not run when it is computed again."""

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
    """What a recorder knows of a running step, whatever its tensors are; `__torch_dispatch__` is its heirs'."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "forward"
        self.calls: list[Call] = []
        self.ledger = Ledger()
        self.function = ""
        # The state where Python called the function: inside of autocast's own kernels it is off.
        self.autocast: torch.dtype | None = None
        self.reads = DtypeReads()
        # Who made the dtype that the function was told, where that is another tensor's.
        self.like: Origin | None = None
        self.names: dict[int, Origin] = {}
        # Float dtypes of the step's inputs.
        self.inputs: set[torch.dtype] = set()
        # The parameters and buffers that a module itself holds, by its name, as the ledger has them.
        self.held: dict[str, list[tuple[torch.Tensor, MemoryKind, int, int | None]]] = {}
        self._frames: list[_Frame] = []
        self._places: dict[int, Place] = {}
        self._alive: list[Any] = []
        self._raised_in: _Frame | None = None

    # -------------------------------------------------------------------------------------------------- modules

    def watch(self, model: nn.Module) -> list[Any]:
        """Follow the modules of `model` by hooks and know its parameters and buffers by name; returns the handles."""
        handles: list[Any] = []
        # By name: a recomputation may enter a module without those that it is in.
        standing = repeats_of(model)
        for name, module in model.named_modules(remove_duplicate=True):
            repeats = standing[name]
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks: what it runs is its caller's
            # What bitsandbytes' layers return is cast to the dtype that they were given.
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
        """Know by name what the modules hold as plain attributes, unless it is known as something else."""
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
        """A module's forward begins, which stands for `repeats`; what it casts to the dtype of `returns` has that one's origin."""
        self._frames.append(_Frame(name, repeats, self.ledger.mark(), returns))

    @listening
    def _leaving(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.leave((args, kwargs), output)

    def leave(self, arguments: Any = (), output: Any = None) -> None:
        """The innermost module's forward is over, which was called with `arguments` and returned `output`."""
        if not self._frames:
            return
        frame = self._frames.pop()
        # Hooks run on the way of an exception too; the first to hear of it knows where it came from.
        self._raised_in = (self._raised_in or frame) if sys.exc_info()[1] is not None else None
        for tensor, kind, repeats, held in self.held.get(frame.name, ()):
            self.ledger.seen(
                tensor, kind, repeats, held
            )  # its memory may be another one than before (`weight.data = …`)
        outer = self._frames[-1].repeats if self._frames else 1
        if frame.repeats != outer and self.phase == "forward" and torch.is_grad_enabled():
            inputs, outputs = (
                [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]
                for tree in (arguments, output)
            )
            self.ledger.multiply(frame.name, frame.entered, frame.repeats // outer, inputs, outputs)

    @property
    def module(self) -> str:
        """The innermost module whose forward is running."""
        return self._frames[-1].name if self._frames else ""

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Operators inside belong to `phase`."""
        before, self.phase = self.phase, phase
        self._frames.clear()
        self.ledger.begin(phase)
        try:
            yield
        finally:
            self.phase = before

    # ---------------------------------------------------------------------------------------------- provenance

    def origin(self, tensor: torch.Tensor) -> Origin:
        """Who made the dtype of `tensor`."""
        known = self.names.get(id(tensor))
        if known is None or known.dtype != tensor.dtype:  # a parameter that the forward itself has cast
            known = getattr(tensor, ORIGIN, known)
        if known is None:
            known = self._unknown(tensor)
            self.mark(tensor, known)
        return known

    def _unknown(self, tensor: torch.Tensor) -> Origin:
        """The origin of a tensor that nothing in the step made: a number, or one that the code keeps for itself."""
        source = shown(asking_line())
        if not tensor.shape or isinstance(tensor, FakeTensor) or self.function in _FACTORIES:
            function, like = self._function_name("a tensor"), self._like(tensor.dtype)
            return Origin("constant", tensor.dtype, function, self.module, source, like=like)
        if _is_borrowed(tensor):
            return Origin("constant", tensor.dtype, "NumPy", self.module, source)
        return Origin("outside", tensor.dtype, _KEPT_OUTSIDE, self.module, source)

    def mark(self, tensor: torch.Tensor, origin: Origin) -> None:
        """From now on the dtype of `tensor` is `origin`'s."""
        if origin.kind == "input" and origin.dtype in FLOATS:
            self.inputs.add(origin.dtype)
        setattr(tensor, ORIGIN, origin)

    def cast_origin(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin | None:
        """Origin of the target dtype of a cast or of a new tensor when it was read from another tensor; None if the code names it.

        To be called where Python calls the function.
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
        """Tensors with their roles as operands, each with who made its dtype."""
        return tuple(
            Operand(role, tensor.dtype, tuple(tensor.shape), self.origin(tensor)) for role, tensor in tensors
        )

    @property
    def _recomputing(self) -> bool:
        return self.phase == "backward" and bool(self._frames)

    def note(self, name: str, tensors: Sequence[tuple[str, torch.Tensor]], breach: Breach) -> None:
        """Write down a function that was refused, or would be, before any operator ran."""
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
        if name == "aten._safe_softmax.default":  # it notes of every score, in a byte, whether it is -inf
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
                before = before.before  # a gradient is cast in every layer; one step says it
            kind: Any = self._cast_kind() if operands else "constant"
            like = self._like(dtype) if kind in ("cast", "constant") else None
            return Origin(kind, dtype, self._function_name(name), place.module, shown(source), before, like)
        if "dequantize" in name and operands and operands[0].origin.kind == "parameter":
            layer = operands[0].origin.name.rpartition(".")[0]
            return Origin("state", dtype, layer, place.module, shown(source))
        alike = [operand for operand in operands if operand.dtype == dtype]
        # A tensor without dimensions takes no part in promotion; it counts where there is nothing else of its kind.
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
        """The place of the operator that runs now; in a backward, that of the forward call it belongs to."""
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
    """Whether a tensor lies in memory that torch did not allocate, as those of `torch.from_numpy` do."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return plain and not tensor.untyped_storage().resizable()


def _is_anothers_scratch(operands: Sequence[Operand], place: Place) -> bool:
    """Whether a copy goes, with a change of the dtype, into unset memory that another module has allocated."""
    into, value = operands[:2]
    made_by = into.origin
    unset = made_by.kind == "constant" and made_by.name in _UNSET
    return unset and into.dtype != value.dtype and bool(made_by.module) and made_by.module != place.module


def _tells(operand: Operand) -> int:
    """Rank of an operand as the source of a dtype: lower tells more.

    An empty or filled tensor took its dtype from Python code, and a gradient takes that of the forward's value; what
    they are joined with tells more. So does a weight that meets an input of the step in the same dtype: the input could
    not have had another one there.
    """
    kinds = {step.kind for step in operand.origin.path()}
    cause = operand.origin.cause.kind
    return 3 if cause == "constant" else 2 if "gradient" in kinds else 1 if cause == "input" else 0


def width(dtype: torch.dtype) -> int:
    return dtype.itemsize
