"""A dispatch mode that records every operator of a training step, and the origin of each operand's dtype.

A dispatch mode runs below autograd, so it records forward, backward and optimizer. Autograd's sequence numbers link an
operator of the backward to its operator of the forward. `trace.fake.recorder` records a step on fake tensors,
`trace.live` a real step.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from traceback import walk_stack
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import (
    FakeTensor,
    UncompiledMode,
    current_node,
    last_node_number,
    node_number,
    sizes_of,
)
from isotype.core.dtypes import FLOATS, HALVES
from isotype.core.operators import leaves, numbers_in, tensors_of
from isotype.core.source import asking_frame, asking_line, is_called_by, shown
from isotype.model.loss import ends_behind
from isotype.model.repeated_layers import calls_represented
from isotype.model.walk import listening, name_in_process, plain_tensors, repeats_of
from isotype.records.finding import in_library
from isotype.records.memory import MemoryKind, Phase
from isotype.records.trace import (
    CAST_FUNCTIONS,
    CASTS,
    FROM_NUMPY,
    OUTPUT_DTYPE,
    PARAM_DTYPE,
    Breach,
    Call,
    Operand,
    Origin,
)
from isotype.trace.dtype_reads import DtypeReads
from isotype.trace.ledger import Ledger
from isotype.trace.operator_call import CallPlace, OperatorCall, flops_of, scratch_bytes

aten = torch.ops.aten

ORIGIN = "_isotype_origin"
"""A tensor stores the origin of its dtype in this attribute."""

_FUNCTION_NODE: Any = torch.autograd.function.BackwardCFunction  # in the graph, a `torch.autograd.Function`
LIFTS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})
"""The last operator of each `torch.tensor` call is one of these."""
_SHORTENED = frozenset({"detach", "__get__", "tensor", "as_tensor"})
"""Functions by which a script detaches tensors. Autograd itself also detaches the results that it saves."""
_READS = frozenset({aten._local_scalar_dense.default, aten.argmax.default})
_UNSET = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})

# These functions create a real tensor first. The dispatcher then makes it a fake tensor.
_FACTORIES = frozenset({"tensor", "as_tensor", "from_numpy", "asarray", "new_tensor"})
# Functions whose result has the dtype of another tensor -> the argument position of that tensor.
_TAKE_FROM = {"to": 1, "type_as": 1, "new_tensor": 0}
_CHECKPOINTS = "_gradient_checkpointing_func"
"""Attribute of a transformers layer: its gradient checkpointing function."""


@dataclass
class _Frame:
    """A module whose forward is running. `entered`: `ledger.mark()` at the start. `enter` explains `returns`."""

    name: str
    repeats: int
    entered: int
    returns: Origin | None = None
    module: nn.Module | None = None


class Recorder(UncompiledMode):  # type: ignore[no-untyped-call]
    """The recorded calls and the state of a running step; subclasses implement `__torch_dispatch__`."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind  # of the traced device; "" for the device of the step's tensors
        self.phase: Phase = "forward"
        self.calls: list[Call] = []
        self.ledger = Ledger()
        self.function = ""
        # Autocast's dtype at the Python call of the function. Inside of autocast's kernels, autocast is off.
        self.autocast: torch.dtype | None = None
        self.reads = DtypeReads()
        # The origin of the function's dtype argument, if the code reads the dtype from another tensor.
        self.like: Origin | None = None
        self.names: dict[int, Origin] = {}
        # Dtype in which FSDP has gathered the last parameter; None if there is none.
        self.gathered: torch.dtype | None = None
        # Id of a leaf tensor -> the first line of user code that detaches a value computed from it.
        self.cuts: dict[int, str] = {}
        self._cut_nodes: set[int] = set()
        # Id of a frozen parameter -> the line that froze it, and the number of calls before it.
        self.frozen: dict[int, tuple[str, int]] = {}
        # Float dtypes of the step's inputs.
        self.inputs: dict[str, torch.dtype] = {}
        # Module name -> arguments of `Ledger.count` for the module's own parameters and buffers.
        self.module_tensors: dict[str, list[tuple[torch.Tensor, MemoryKind, int, int | None]]] = {}
        self._frames: list[_Frame] = []
        self._places: dict[int, CallPlace] = {}
        self._alive: list[Any] = []
        self._raised_in: _Frame | None = None
        # The exception that was handled when the trace began. No module of the step has raised it.
        self._handled = sys.exc_info()[1]

    # -------------------------------------------------------------------------------------------------- modules

    def watch(self, model: nn.Module) -> ExitStack:
        """Add hooks to the modules of `model`, and register its tensors. Close the result to remove the hooks."""
        hooks = ExitStack()
        # Repeats by name, because a recomputation may enter a module without its parents.
        repeats = repeats_of(model)
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # a script module takes no hooks: its operators are recorded in the calling module
            entering = listening(partial(self._entering, name, repeats[name]))
            hooks.enter_context(module.register_forward_pre_hook(entering, prepend=True))
            leaving = module.register_forward_hook(self._leaving, always_call=True, with_kwargs=True)
            hooks.enter_context(leaving)
            if (checkpoint := module.__dict__.get(_CHECKPOINTS)) is not None:
                setattr(module, _CHECKPOINTS, self._recomputing_in(name, repeats[name], checkpoint))
                hooks.callback(setattr, module, _CHECKPOINTS, checkpoint)
        for name, parameter in model.named_parameters():
            self._register(parameter, Origin("parameter", parameter.dtype, name))
        for name, buffer in model.named_buffers():
            self._register(buffer, Origin("buffer", buffer.dtype, name))
        return hooks

    def _register(self, tensor: torch.Tensor, origin: Origin) -> None:
        self.names[id(tensor)] = origin
        self._alive.append(tensor)

    def _register_plain_tensors(self, model: nn.Module, prefix: str = "") -> None:
        """Register the tensors that are plain attributes of modules, unless they are registered already."""
        for module_name, module in model.named_modules():
            for name, tensor in plain_tensors(module):
                if id(tensor) not in self.names:
                    full = f"{module_name}.{name}" if module_name else name
                    self._register(tensor, Origin("attribute", tensor.dtype, f"{prefix}{full}"))

    def _entering(self, name: str, repeats: int, module: nn.Module, args: Any) -> None:
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        # bitsandbytes' layers cast their output to their input's dtype.
        casts_back = type(module).__module__.startswith("bitsandbytes.")
        returns = self.origin(first) if casts_back and first is not None else None
        self.enter(name, repeats, returns, module)

    def _recomputing_in(self, name: str, repeats: int, checkpoint: Any) -> Callable[..., Any]:
        """Wrap the checkpointing function of a transformers (5.23) layer, to record recomputed operators in this layer.

        A recomputation calls the layer's forward directly, so the layer's hooks do not run.
        """

        def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def inside(*args: Any, **kwargs: Any) -> Any:
                if self.phase != "backward" or self.module == name:
                    return function(*args, **kwargs)
                self.enter(name, repeats)
                try:
                    return function(*args, **kwargs)
                finally:
                    self.leave()

            return checkpoint(inside, *args, **kwargs)

        return checkpointed

    def enter(
        self, name: str, repeats: int = 1, returns: Origin | None = None, module: nn.Module | None = None
    ) -> None:
        """Record the start of a module's forward. `returns`: origin of the input's dtype if the output is cast to it."""
        if self._frames and repeats != self._frames[-1].repeats:
            self.ledger.enter_representing()
        self._frames.append(_Frame(name, repeats, self.ledger.mark(), returns, module))

    @listening
    def _leaving(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.leave((args, kwargs), output)

    def leave(self, arguments: Any = (), output: Any = None) -> None:
        """Record the end of the innermost module's forward, with its arguments and output."""
        if not self._frames:
            return
        frame = self._frames.pop()
        # Hooks also run while an exception propagates. The first module whose hook runs then has raised it.
        raised = sys.exc_info()[1] is not self._handled
        self._raised_in = (self._raised_in or frame) if raised else None
        for row in self.module_tensors.get(frame.name, ()):
            self.ledger.count(*row)  # the tensor's memory may have changed (`weight.data = …`)
        outer = self._frames[-1].repeats if self._frames else 1
        saves, added = self.phase == "forward" and torch.is_grad_enabled(), 0
        if frame.repeats != outer and self.phase != "backward":
            inputs, outputs = [*tensors_of(arguments)], [*tensors_of(output)]
            times = frame.repeats // outer
            if saves:
                added = self.ledger.multiply(frame.name, frame.entered, times, inputs, outputs)
            else:
                self.ledger.keep(frame.name, frame.entered, times, outputs)
        if saves and _is_layer(frame.name) and not any(_is_layer(other.name) for other in self._frames):
            self.ledger.saved_by_layer(frame.entered, added, frame.repeats)

    @property
    def module(self) -> str:
        """Name of the innermost module whose forward is running; "" outside of all modules."""
        return self._frames[-1].name if self._frames else ""

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before, self.phase = self.phase, phase
        self._frames.clear()
        self.ledger.begin(phase)
        try:
            yield
        finally:
            self.phase = before

    # ---------------------------------------------------------------------------------------------- provenance

    def origin(self, tensor: torch.Tensor) -> Origin:
        origin = self.names.get(id(tensor))
        if origin is None or origin.dtype != tensor.dtype:  # the forward has cast the parameter itself
            origin = getattr(tensor, ORIGIN, origin)
        if origin is None:
            origin = self._unknown(tensor)
            self.mark(tensor, origin)
        return origin

    def _unknown(self, tensor: torch.Tensor) -> Origin:
        """Return the origin of a tensor that no operator of the step has returned."""
        source = shown(asking_line())
        frame = self._frames[-1] if self._frames else None
        # FSDP2 gives a module another parameter for its forward: the gathered one in the policy's dtype.
        if frame is not None and frame.module is not None and isinstance(tensor, nn.Parameter):
            for name, parameter in frame.module.named_parameters(recurse=False):
                if parameter is tensor:
                    self.gathered = tensor.dtype
                    return Origin("parameter", tensor.dtype, f"{frame.name}.{name}".lstrip("."))
        if not tensor.shape or isinstance(tensor, FakeTensor) or self.function in _FACTORIES:
            function, like = self.function or "a tensor", self._like(tensor.dtype)
            return Origin("constant", tensor.dtype, function, self.module, source, like=like)
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
        on_cpu = plain and tensor.device.type == "cpu"
        if on_cpu and not tensor.untyped_storage().resizable():  # as with `torch.from_numpy`
            return Origin("constant", tensor.dtype, FROM_NUMPY, self.module, source)
        if isinstance(tensor, nn.Parameter) and not self._frames:  # such as the head's, in a loss by chunks
            return Origin("data", tensor.dtype, name_in_process(tensor), source=source)
        if self.phase == "forward" and not self._frames:  # the loss of a script, with its targets
            return Origin("data", tensor.dtype, "", source=source)
        kept = "a tensor that the code stores outside of the model"
        return Origin("outside", tensor.dtype, kept, self.module, source)

    def mark(self, tensor: torch.Tensor, origin: Origin) -> None:
        if origin.kind == "input" and origin.dtype in FLOATS:
            self.inputs[origin.name] = origin.dtype
        setattr(tensor, ORIGIN, origin)

    def mark_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """Record that `parameter.grad` is the gradient of the parameter `name`. The gradient must exist."""
        assert parameter.grad is not None
        origin = Origin("gradient", parameter.grad.dtype, name, before=self.origin(parameter))
        self.mark(parameter.grad, origin)

    def cast_origin(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin | None:
        """Return the origin of the tensor from which the function `name` takes a dtype (`x` in `y.to(x.dtype)`).

        Return None if the code names the dtype itself. Call this method while the function `name` runs.
        """
        if name in _TAKE_FROM:
            like = kwargs.get("other", next(iter(args[_TAKE_FROM[name] :]), None))
            if isinstance(like, torch.Tensor) and kwargs.get("dtype") is None:
                return self.origin(like)
        dtype = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), None)
        return self.reads.origin_of(dtype) if isinstance(dtype, torch.dtype) else self.like

    def note_widened(self, treatment: str, result: Any) -> None:
        """Record that autocast has chosen float32, also for float32 operands. `treatment`: autocast's list of the function."""
        for tensor in leaves(result) if treatment == "float32" else ():
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                before, place = self.origin(tensor), self._place()
                # The last cast explains the dtype: without it, the path would grow with every layer.
                earlier = before.cause.before if before.cause.kind == "autocast" else before
                origin = Origin(
                    "autocast", torch.float32, self.function, place.module, shown(place.source), earlier
                )
                self.mark(tensor, origin)

    def note_unchanged(self, name: str, tensor: Any, result: Any) -> None:
        """Record that a cast without effect (`y.to(x.dtype)`) lets `x` decide the dtype of `y`, unless `y` is stored."""
        if result is not tensor or name not in _TAKE_FROM or (like := self._like(result.dtype)) is None:
            return
        before = self.origin(tensor)
        if before.kind in ("cast", "operator", "promotion") and before.cause is not like.cause:
            source = shown(asking_line())
            self.mark(tensor, Origin("cast", like.dtype, name, self.module, source, before=before, like=like))

    def _like(self, dtype: torch.dtype) -> Origin | None:
        return self.like if self.like is not None and self.like.dtype == dtype else None

    def operands(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[Operand, ...]:
        """Return an operand for each (argument name, tensor), with the origin of the tensor's dtype."""
        return tuple([Operand(role, t.dtype, sizes_of(t), self.origin(t)) for role, t in tensors])

    @property
    def _recomputing(self) -> bool:
        return self.phase == "backward" and bool(self._frames)

    def note(
        self, name: str, tensors: Sequence[tuple[str, torch.Tensor]], breach: Breach | None = None
    ) -> None:
        """Record a function that ran no operator. `breach`: the function's error, here or on the traced device."""
        self._append(name, self._place(), self.operands(tensors), (), breach=breach)

    def _append(
        self, name: str, place: CallPlace, operands: tuple[Operand, ...], results: Any, **fields: Any
    ) -> None:
        call = Call(
            name,
            self.phase,
            place.module,
            shown(place.source),
            operands,
            results,
            repeats=place.repeats * calls_represented.get(),
            recomputed=self._recomputing,
            autocast=self.autocast,
            **fields,
        )
        self.calls.append(call)

    def _write(self, call: OperatorCall, result: Any) -> None:
        func, name, place, breach = call.func, call.name, call.place, call.breach
        operands = self.operands(call.tensors)
        outputs = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in outputs:
            if not any(tensor is operand for _, operand in call.tensors):
                self.mark(tensor, self._origin_of(call, tensor, operands))
            elif name == "aten.copy_.default" and _is_anothers_scratch(operands, place):
                memory = operands[0].origin
                self.mark(tensor, Origin("scratch", tensor.dtype, memory.module, source=memory.source))
            self.ledger.count(tensor)
        if outputs:
            device = self.kind or outputs[0].device.type
            self.ledger.touch("activations", scratch_bytes(name, device, call.args, outputs[0]))
        if breach is not None:
            if place.breached and self.phase == "backward" and not self._recomputing:
                breach = replace(breach, consequence=True)
            place.breached = True
        if func in _READS or (func is aten.detach.default and self.function in _SHORTENED):
            self._cut(call.tensors[0][1], shown(place.source))
        results = tuple([(tensor.dtype, sizes_of(tensor)) for tensor in outputs])
        self._append(
            name,
            place,
            operands,
            results,
            flops=flops_of(func, call.args, call.kwargs, result) if outputs else 0,
            breach=breach,
            numbers=numbers_in(func, call.args, call.kwargs),
            by_default=not operands and call.kwargs.get("dtype") is None,
            cuts="gemv_4bit" in name and any(tensor.requires_grad for _, tensor in call.tensors),
        )

    def _cut(self, tensor: torch.Tensor, source: str) -> None:
        """Record that a line of code reads or copies a tensor's value without its graph."""
        if self.phase == "forward" and source and not in_library(source):
            for end in ends_behind(tensor, self._cut_nodes):
                self.cuts.setdefault(id(getattr(end, "variable", None)), source)

    def set_trainable(self, func: Any, *args: Any) -> None:
        """Record the line that freezes or unfreezes a tensor by `func(*args)`; with PEFT, the line that calls PEFT."""
        sets = getattr(func, "__self__", None) is torch.Tensor.requires_grad and len(args) > 1
        if not sets and func is not torch.Tensor.requires_grad_:
            return
        tensor, value = (*args, True)[:2]
        if value:
            self.frozen.pop(id(tensor), None)
            if self.phase == "forward" and not tensor.requires_grad and id(tensor) not in self.names:
                self.note("torch.Tensor.requires_grad_", [("self", tensor)])
        elif tensor.requires_grad and id(tensor) in self.names:
            frames = (frame for frame, _ in walk_stack(asking_frame()))
            frame = next(f for f in frames if "peft" not in f.f_globals.get("__name__", "").split("."))
            self.frozen[id(tensor)] = f"{frame.f_code.co_filename}:{frame.f_lineno}", len(self.calls)

    def _origin_of(self, call: OperatorCall, tensor: torch.Tensor, operands: Sequence[Operand]) -> Origin:
        """Return the origin of the dtype of `tensor`, a result of the call. `operands` are the call's operands."""
        name, dtype, module, source = call.name, tensor.dtype, call.place.module, shown(call.place.source)
        function = self.function or name
        before = operands[0].origin if operands else None
        alike = [operand for operand in operands if operand.dtype == dtype]
        # 0-dim tensors do not count in dtype promotion, unless all operands are 0-dim.
        alike = [operand for operand in alike if operand.shape] or alike
        winner = min(alike, key=_rank, default=None) if len(alike) != 1 else alike[0]  # a rank takes long
        if call.breach is not None:
            chosen = winner.origin.cause if winner is not None else None
            chosen = chosen.before if chosen is not None and chosen.kind == "conversion" else chosen
            return Origin("conversion", dtype, name, module, source, chosen)
        if name in CASTS or call.kwargs.get("dtype") is not None:
            if operands and operands[-1].dtype == dtype and name in CASTS:
                return operands[-1].origin
            returns = self._frames[-1].returns if self._frames else None
            if returns is not None and returns.dtype == dtype:
                return returns
            if before is not None and before.kind == "gradient":
                before = before.before  # a gradient is cast in every layer: keep only the last cast
            if "torch.distributed.fsdp" in sys.modules and is_called_by("torch.distributed.fsdp"):
                if self.gathered is None and self.phase == "forward" and before and before.kind != "buffer":
                    self.gathered = dtype  # FSDP1's parameters are views, which name no parameter
                if self.gathered is not None:
                    option = PARAM_DTYPE if self.gathered == dtype else OUTPUT_DTYPE
                    return Origin("operator", dtype, option, "", source, before)
            kind: Any = self._cast_kind() if operands else "constant"
            like = self._like(dtype) if kind in ("cast", "constant") else None
            return Origin(kind, dtype, function, module, source, before, like)
        if "dequantize" in name and before is not None and before.kind == "parameter":
            return Origin("state", dtype, before.name.rpartition(".")[0], module, source)
        halves = [operand for operand in operands if operand.dtype in HALVES and operand.shape]
        if winner is None and len({operand.dtype for operand in halves}) == 2:
            # float16 and bfloat16 give float32. The dtype that fewer weights have is the exception.
            held = [origin.dtype for origin in self.names.values()]
            rare = min(halves, key=lambda operand: held.count(operand.dtype))
            return Origin("promotion", dtype, function, module, source, rare.origin)
        if winner is None:
            return Origin("operator" if operands else "constant", dtype, function, module, source, before)
        floats = {operand.dtype for operand in operands if operand.dtype in FLOATS and operand.shape}
        promoted = len(floats) > 1 and dtype == max(floats, key=attrgetter("itemsize"))
        if promoted and dtype in FLOATS and winner.origin.kind != "promotion":
            return Origin("promotion", dtype, function, module, source, winner.origin)
        return winner.origin

    def _cast_kind(self) -> Any:
        if self.phase == "backward" and not self._frames and self.function not in CAST_FUNCTIONS:
            return "gradient"
        by_autocast = self.autocast is not None and self.function not in CAST_FUNCTIONS
        return "autocast" if by_autocast else "cast"

    def _place(self) -> CallPlace:
        """Return the place of the running operator. In the backward, this is the place of the forward operator."""
        node = current_node() if self.phase == "backward" else None
        if node is not None and not self._frames:
            place = self._places.get(node_number(node))
            if place is None:
                return CallPlace("", asking_line(), 1)
            self.ledger.backward_in(place.module)
            return place.written_at(asking_line()) if isinstance(node, _FUNCTION_NODE) else place
        frame = self._frames[-1] if self._frames else None
        place = CallPlace(frame.name if frame else "", asking_line(), frame.repeats if frame else 1)
        if self.phase == "forward" or (self.phase == "backward" and torch.is_grad_enabled()):
            # An operator without a node has the number of an earlier operator's node.
            known = self._places.setdefault(last_node_number(), place)
            return known if (known.module, known.source) == (place.module, place.source) else place
        return place


def _is_anothers_scratch(operands: Sequence[Operand], place: CallPlace) -> bool:
    """Return whether `copy_` casts a tensor into uninitialized memory that another module has allocated."""
    target, value = operands[:2]
    memory = target.origin
    unset = memory.kind == "constant" and memory.name in _UNSET
    return unset and target.dtype != value.dtype and bool(memory.module) and memory.module != place.module


def _is_layer(module: str) -> bool:
    return module.rpartition(".")[2].isdigit() and "." in module


def _rank(operand: Operand) -> int:
    """Return an operand's rank. The operand with the lowest rank decides the dtype of the result.

    -1: values that autocast returns in float32, because a cast of their operands changes nothing.
    0: weights and other computed values. 1: inputs of the step, because users cast them to the weights' dtype.
    2: gradients, because they have the dtype of the forward's value. 3: empty or filled tensors of Python code.
    """
    kinds = {step.kind for step in operand.origin.path()}
    cause = operand.origin.cause.kind
    if cause == "autocast" and operand.dtype == torch.float32 and not kinds & {"cast", "gradient"}:
        return -1
    return 3 if cause == "constant" else 2 if "gradient" in kinds else 1 if cause == "input" else 0
