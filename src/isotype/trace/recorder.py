"""The recorder: a dispatch mode that writes down every operator, judges it and goes on where it breaks a contract.

It sits above `FakeTensorMode` (a preflight) or above nothing (a real script). It sees operators below autograd, so
forward, backward and optimizer look alike; a backward operator finds the forward call it belongs to by the
sequence number that autograd gives both.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from isotype.contracts.contract import Contracts, fills
from isotype.trace.fake import fake_like
from isotype.trace.flops import flops_of
from isotype.trace.fold import STANDS_FOR
from isotype.trace.ledger import Ledger
from isotype.trace.record import Breach, Call, Failure, Operand, Origin, Phase
from isotype.trace.values import LIMIT, Values, fakes_of, is_data_dependent

aten = torch.ops.aten

_ORIGIN = "_isotype_origin"
_FLOATS = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)
_FILLS = frozenset({"aten.masked_fill.Scalar", "aten.masked_fill_.Scalar"})
# torch 2.13's fake kernel takes bfloat16 only (`_meta_grouped_mm_common` in torch/_meta_registrations.py); the CPU's and
# CUDA's take float32 and float16 too. tests/trace/test_recorder.py says when this can go.
_FAKE_TOO_STRICT = frozenset({"aten._grouped_mm.default"})
_CASTS = frozenset({"aten._to_copy.default", "aten.copy_.default", "prims.convert_element_type.default"})
# What `.to(dtype)` and its kind are called where Python calls them; any other function that casts was autocast.
_CAST_FUNCTIONS = frozenset(
    {"to", "float", "half", "bfloat16", "double", "type", "type_as", "copy_", "_to_copy"}
)
# These make a real tensor first, which the dispatcher then lifts into the fakes.
_FACTORIES = frozenset({"tensor", "as_tensor", "from_numpy", "asarray", "new_tensor"})


@dataclass(slots=True)
class _Place:
    """Where an operator runs: module, source, and how many calls of the real step it stands for."""

    module: str
    source: Any
    repeats: int
    breached: bool = False


@dataclass
class _Frame:
    """A module whose forward is running."""

    name: str
    repeats: int
    entered: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down one step.

    Args:
        contracts: what the device accepts.
        compute: dtype that breached operands are converted to where nothing else decides.
        fake: the mode its tensors are fakes of: then values that code branches on get stand-ins, and a broken
            contract is converted and passed. None for a real script.
        lines: `file:line` -> dtype: casts and new tensors that this line asks for get this dtype instead, and what it
            calls with mixed dtypes is converted to it: a change of the code that is to be tried.
    """

    def __init__(
        self,
        contracts: Contracts,
        compute: torch.dtype,
        fake: FakeTensorMode | None,
        lines: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.contracts = contracts
        self.compute = compute
        self.fake = fake
        self.lines = lines or {}
        self.values = Values()
        self.phase: Phase = "forward"
        self.calls: list[Call] = []
        self.ledger = Ledger()
        self.function = ""
        # The state where Python called the function: inside of autocast's own kernels it is off.
        self.autocast: torch.dtype | None = None
        self.autocast_device = (
            "cpu"  # fakes are on the CPU whatever they simulate; a live recorder sets the real one
        )
        self.names: dict[int, Origin] = {}
        self._frames: list[_Frame] = []
        self._places: dict[int, _Place] = {}
        self._alive: list[Any] = []
        self._outside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._raised_in: _Frame | None = None

    # ------------------------------------------------------------------------------------------------ modules

    def watch(self, model: nn.Module) -> list[Any]:
        """Follow the modules of `model` by hooks and know its parameters and buffers by name; returns the handles."""
        handles = []
        for name, module in model.named_modules(remove_duplicate=True):
            repeats = int(getattr(module, STANDS_FOR, 1))
            if not name:
                handles.append(module.register_forward_pre_hook(self._given, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_pre_hook(self._entering(name, repeats), prepend=True))
            handles.append(module.register_forward_hook(self._leaving, always_call=True))
        for name, parameter in model.named_parameters():
            self._own(parameter, Origin("parameter", parameter.dtype, name))
        for name, buffer in model.named_buffers():
            self._own(buffer, Origin("buffer", buffer.dtype, name))
        return handles

    def _own(self, tensor: torch.Tensor, origin: Origin) -> None:
        self.names[id(tensor)] = origin
        self._alive.append(tensor)

    def _given(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Real tensors that the model is called with (by a loss of the caller's own) are its inputs."""
        if self.fake is None:
            return None
        for name, value in (*((f"args[{i}]", arg) for i, arg in enumerate(args)), *kwargs.items()):
            if _is_real(value):
                self.stand_for(value, Origin("input", value.dtype, name))
        return self.swapped(args), self.swapped(kwargs)

    def swapped(self, values: Any) -> Any:
        """Every real tensor replaced by the fake that stands for it: what the step writes, it writes there."""

        def swap(leaf: Any) -> Any:
            return self.stand_for(leaf) if _is_real(leaf) else leaf

        return tree_map(swap, values)

    def stand_for(self, tensor: torch.Tensor, origin: Origin | None = None) -> torch.Tensor:
        """The fake of a real tensor from outside of the twin, the same one each time."""
        known = self._outside.get(id(tensor))
        if known is None:
            assert self.fake is not None
            with _disable_current_modes():
                made = fake_like(tensor.detach(), self.fake).requires_grad_(tensor.requires_grad)
                if tensor.numel() <= LIMIT and not tensor.is_meta:
                    self.values.give(made, tensor.detach().cpu().clone())
            self._outside[id(tensor)] = known = (tensor, made)
            self.mark(made, origin or self._unknown(tensor))
        return known[1]

    def _entering(self, name: str, repeats: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self.enter(name, repeats)

        return enter

    def enter(self, name: str, repeats: int = 1) -> None:
        """A module's forward begins."""
        outer = self._frames[-1].repeats if self._frames else 1
        self._frames.append(_Frame(name, outer * repeats, self.ledger.total))

    def _leaving(self, *_: Any) -> None:
        self.leave()

    def leave(self) -> None:
        """The innermost module's forward is over."""
        if not self._frames:
            return
        frame = self._frames.pop()
        # Hooks run on the way of an exception too; the first to hear of it knows where it came from.
        self._raised_in = (self._raised_in or frame) if sys.exc_info()[1] is not None else None
        outer = self._frames[-1].repeats if self._frames else 1
        if frame.repeats != outer and self.phase == "forward" and torch.is_grad_enabled():
            self.ledger.multiply(frame.name, frame.entered, frame.repeats // outer)

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

    # ----------------------------------------------------------------------------------------------- dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        # Function modes see what the model calls, not what this recorder and the fake kernels do.
        with torch._C.DisableTorchFunction():
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        place = self._place()
        if self.lines and kwargs.get("dtype") in _FLOATS and _shown(place.source) in self.lines:
            kwargs = {**kwargs, "dtype": self.lines[_shown(place.source)]}
        tensors = _tensors(func, args, kwargs)
        breach: Breach | None = None
        value = self.values.compute(func, args, kwargs, tensors) if self.fake else None
        if value is not None and is_data_dependent(func):
            result = fakes_of(value, self.values, self.fake)
        else:
            result, breach = self._judged(func, args, kwargs, tensors, place)
            if self.fake:
                self._keep(func, tensors, result, value)
        self._write(func, args, kwargs, tensors, result, place, breach)
        return result

    def _judged(
        self, func: Any, args: Any, kwargs: Any, tensors: Any, place: _Place
    ) -> tuple[Any, Breach | None]:
        name = str(func)
        overflow = _overflow(name, args)
        if overflow is not None and self.fake:
            return self._run(func, (*args[:2], 0.0, *args[3:]), kwargs, tensors)[0], overflow
        verdict = self.contracts.judge(name, tuple(tensor.dtype for _, tensor in tensors))
        if verdict is None or not self.fake or (not verdict.accepted and fills(name, args)):
            return self._run(func, args, kwargs, tensors)
        if verdict.accepted:
            if name in _FAKE_TOO_STRICT:
                return self._as_bfloat16(func, args, kwargs, tensors), None
            result, breach = self._run(func, args, kwargs, tensors)
            # Where a fake kernel gets the result's dtype wrong, the measured one counts (mixed norms, some losses).
            mixed = len({tensor.dtype for _, tensor in tensors if tensor.dtype in _FLOATS}) > 1
            return (_as_measured(result, verdict.results) if mixed and not breach else result), breach
        edited = self.lines.get(_shown(place.source)) if self.lines else None
        target = edited or self._target(func, tensors)
        breach = None if edited else Breach(verdict.message, verdict.assumed, target)
        return self._run_converted(func, args, kwargs, target), breach

    def _as_bfloat16(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        """Run a fake kernel that knows only bfloat16 of an operator that takes more, and return what was given."""
        given = next(tensor.dtype for _, tensor in tensors if tensor.dtype in _FLOATS)
        return aten._to_copy.default(self._run_converted(func, args, kwargs, torch.bfloat16), dtype=given)

    def _keep(self, func: Any, tensors: Any, result: Any, value: Any) -> None:
        """Values of the results where they are known; what something unknown was written into is forgotten."""
        if value is not None:
            for made, real in zip(_leaves(result), _leaves(value), strict=True):
                if isinstance(made, torch.Tensor):
                    self.values.give(made, real)
        else:
            written = _schema(func).written
            for role, tensor in tensors:
                if role.partition("[")[0] in written:
                    self.values.forget(tensor)

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> tuple[Any, Breach | None]:
        """Run it as it is; where the fake kernel refuses mixed dtypes, note the breach and convert."""
        try:
            other = self.values.stand_in(func, args, kwargs) if self.fake else None
            return (other or func)(*args, **kwargs), None
        except Exception as error:
            floats = {tensor.dtype for _, tensor in tensors if tensor.dtype in _FLOATS}
            if not self.fake or len(floats) < 2 or not says_dtypes(error):
                self._failed(func, error, tensors)
                raise
            target = self._target(func, tensors)
            return self._run_converted(func, args, kwargs, target), Breach(_first_line(error), False, target)

    def _failed(self, func: Any, error: Exception, tensors: Any) -> None:
        """A live operator raised: keep the call, with the way of its operands' dtypes, for the diagnosis."""
        if self.fake or not isinstance(error, (RuntimeError, TypeError, NotImplementedError, ValueError)):
            return
        place = self._place()
        self._write(func, (), {}, tensors, None, place, Breach(_first_line(error), False, None))

    def composite(self, func: Any, args: Any, kwargs: Any, error: Exception) -> torch.dtype | None:
        """A function refused its operands before any operator ran; returns the dtype to go on with, or None."""
        tensors = [
            (f"[{i}]", leaf)
            for i, leaf in enumerate(_leaves((args, tuple(kwargs.values()))))
            if isinstance(leaf, torch.Tensor)
        ]
        floats = {tensor.dtype for _, tensor in tensors if tensor.dtype in _FLOATS}
        # Autocast refuses a 16-bit dtype other than its own where it promotes (at::autocast::prioritize).
        cast = torch.get_autocast_dtype("cpu") if "autocast" in str(error) else None
        if self.fake is None or len(floats) + (cast is not None) < 2 or not says_dtypes(error):
            return None
        target = cast or (self.compute if self.compute in floats else max(floats, key=_width))
        operands = tuple(
            Operand(role, tensor.dtype, tuple(tensor.shape), self.origin(tensor)) for role, tensor in tensors
        )
        place = self._place()
        breach = Breach(_first_line(error), False, target)
        name = f"torch.{getattr(func, '__name__', func)}"
        self.calls.append(
            Call(
                name,
                self.phase,
                place.module,
                _shown(place.source),
                operands,
                (),
                0,
                place.repeats,
                breach,
                recomputed=self.phase == "backward" and bool(self._frames),
                autocast=self.autocast,
            )
        )
        return target

    def array(self, tensor: torch.Tensor) -> Any:
        """What stands for `tensor.numpy()`: zeros; NumPy has no bfloat16, which is a breach."""
        dtype = tensor.dtype
        if dtype == torch.bfloat16:
            dtype = torch.float32
            operand = Operand("self", tensor.dtype, tuple(tensor.shape), self.origin(tensor))
            place = self._place()
            self.calls.append(
                Call(
                    "torch.Tensor.numpy",
                    self.phase,
                    place.module,
                    _shown(place.source),
                    (operand,),
                    (),
                    breach=Breach("Got unsupported ScalarType BFloat16", False, dtype),
                )
            )
        known = self.values.of(tensor)
        with unset_fake_temporarily():
            return (torch.zeros(tensor.shape, dtype=dtype) if known is None else known.to(dtype)).numpy()

    def listed(self, tensor: torch.Tensor) -> Any:
        """What stands for `tensor.tolist()`: its values where they are known, else ones (True)."""
        known = self.values.of(tensor)
        with unset_fake_temporarily():
            return (torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known).tolist()

    def failure(self, error: Exception) -> Failure:
        """What ended the step, with the place it had got to."""
        frame = self._raised_in or (self._frames[-1] if self._frames else None)
        raised = _innermost(error)
        source = f"{raised.f_code.co_filename}:{raised.f_lineno}" if raised is not None else ""
        text = f"{type(error).__name__}: {_first_line(error)}"
        with torch._C.DisableTorchFunction():
            operands = () if raised is None else tuple(self._at_hand(raised.f_locals))
        mixed = len({operand.dtype for operand in operands}) > 1
        again = self.phase == "backward" and frame is not None
        return Failure(self.phase, frame.name if frame else "", source, text, mixed, operands, again)

    def _at_hand(self, variables: Mapping[str, Any]) -> Iterator[Operand]:
        for name, value in variables.items():
            if isinstance(value, torch.Tensor) and value.dtype in _FLOATS:
                yield Operand(name, value.dtype, tuple(value.shape), self.origin(value))

    def banned(self, name: str, args: Any, kwargs: Any) -> None:
        """A function that autocast refuses to run."""
        tensors = [leaf for leaf in _leaves((args, tuple(kwargs.values()))) if isinstance(leaf, torch.Tensor)]
        operands = tuple(
            Operand(f"[{i}]", leaf.dtype, tuple(leaf.shape), self.origin(leaf))
            for i, leaf in enumerate(tensors)
        )
        place = self._place()
        breach = Breach(f"torch.nn.functional.{name} is unsafe to autocast", False, torch.float32)
        source = _shown(place.source)
        self.calls.append(
            Call(
                f"torch.{name}",
                self.phase,
                place.module,
                source,
                operands,
                (),
                breach=breach,
                autocast=self.autocast,
            )
        )

    def _target(self, func: Any, tensors: Sequence[tuple[str, torch.Tensor]]) -> torch.dtype:
        """The dtype to convert to: that of what an operator writes into, else the policy's, else the widest."""
        floats = [tensor.dtype for _, tensor in tensors if tensor.dtype in _FLOATS]
        if _schema(func).mutates and tensors and tensors[0][1].dtype in _FLOATS:
            return tensors[0][1].dtype
        if len(set(floats)) == 1:
            return torch.float32  # no kernel for this dtype: there is one for float32
        if self.compute in floats:
            return self.compute
        return max(floats, key=_width, default=self.compute)

    def _run_converted(self, func: Any, args: Any, kwargs: Any, target: torch.dtype) -> Any:
        def convert(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                wrong = value.dtype in _FLOATS and value.dtype != target
                return aten._to_copy.default(value, dtype=target) if wrong else value
            if isinstance(value, (list, tuple)):
                return type(value)(map(convert, value))
            return value

        if _schema(func).mutates and isinstance(args[0], torch.Tensor) and args[0].dtype != target:
            return args[0]
        if _schema(func).mutates and args and isinstance(args[0], (list, tuple)):
            return None  # a list of tensors written in place: nothing flows on from it but what was there
        return func(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})

    # --------------------------------------------------------------------------------------------- provenance

    def origin(self, tensor: torch.Tensor) -> Origin:
        """Who made the dtype of `tensor`."""
        known = self.names.get(id(tensor)) or getattr(tensor, _ORIGIN, None)
        if known is None:
            known = self._unknown(tensor)
            self.mark(tensor, known)
        return known

    def _unknown(self, tensor: torch.Tensor) -> Origin:
        """The origin of a tensor that nothing in the step made: a number, or one that the code keeps for itself."""
        source = _shown(_frame())
        if not tensor.shape or isinstance(tensor, FakeTensor) or self.function in _FACTORIES:
            return Origin("constant", tensor.dtype, self._said("a tensor"), self.module, source)
        return Origin("outside", tensor.dtype, "a tensor kept outside of the model", self.module, source)

    def mark(self, tensor: torch.Tensor, origin: Origin) -> None:
        """From now on the dtype of `tensor` is `origin`'s."""
        setattr(tensor, _ORIGIN, origin)

    def _write(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[tuple[str, torch.Tensor]],
        result: Any,
        place: _Place,
        breach: Breach | None,
    ) -> None:
        name = str(func)
        operands = tuple(
            Operand(role, tensor.dtype, tuple(tensor.shape), self.origin(tensor)) for role, tensor in tensors
        )
        made = [leaf for leaf in _leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            if not any(tensor is operand for _, operand in tensors):
                origin = self._origin_of(name, tensor, operands, kwargs, place, breach)
                self.mark(tensor, origin)
            self.ledger.seen(tensor)
        recomputed = self.phase == "backward" and bool(self._frames)
        if breach is not None:
            if place.breached and self.phase == "backward" and not recomputed:
                breach = replace(breach, consequence=True)
            place.breached = True
        self.calls.append(
            Call(
                name,
                self.phase,
                place.module,
                _shown(place.source),
                operands,
                tuple((tensor.dtype, tuple(tensor.shape)) for tensor in made),
                flops_of(func, args, kwargs, result) if made else 0,
                place.repeats,
                breach,
                recomputed,
                self.autocast,
            )
        )

    def _origin_of(
        self,
        name: str,
        tensor: torch.Tensor,
        operands: Sequence[Operand],
        kwargs: Any,
        place: _Place,
        breach: Breach | None,
    ) -> Origin:
        dtype, source = tensor.dtype, place.source
        if breach is not None:
            return Origin("conversion", dtype, name, place.module, _shown(source))
        if name in _CASTS or kwargs.get("dtype") is not None:
            if operands and operands[-1].dtype == dtype and name in _CASTS:
                return operands[-1].origin
            before = operands[0].origin if operands else None
            if before is not None and before.kind == "gradient":
                before = before.before  # a gradient is cast in every layer; one step says it
            return Origin(
                self._cast_kind() if operands else "constant",
                dtype,
                self._said(name),
                place.module,
                _shown(source),
                before,
            )
        if "dequantize" in name and operands and operands[0].origin.kind == "parameter":
            layer = operands[0].origin.name.rpartition(".")[0]
            return Origin("state", dtype, layer, place.module, _shown(source))
        alike = [operand for operand in operands if operand.dtype == dtype]
        winner = min(alike, key=_tells, default=None)
        if winner is None:
            before = operands[0].origin if operands else None
            kind = "operator" if operands else "constant"
            return Origin(kind, dtype, self._said(name), place.module, _shown(source), before)  # type: ignore[arg-type]
        floats = {operand.dtype for operand in operands if operand.dtype in _FLOATS and operand.shape}
        promoted = len(floats) > 1 and dtype == max(floats, key=_width)
        if promoted and dtype in _FLOATS and winner.origin.kind != "promotion":
            return Origin("promotion", dtype, self._said(name), place.module, _shown(source), winner.origin)
        return winner.origin

    def _cast_kind(self) -> Any:
        if self.phase == "backward" and not self._frames and self.function not in _CAST_FUNCTIONS:
            return "gradient"
        by_autocast = self.autocast is not None and self.function not in _CAST_FUNCTIONS
        return "autocast" if by_autocast else "cast"

    def _said(self, name: str) -> str:
        return self.function or name

    # ------------------------------------------------------------------------------------------------- place

    def _place(self) -> _Place:
        """The place of the operator that runs now; in a backward, that of the forward call it belongs to."""
        node = torch._C._current_autograd_node() if self.phase == "backward" else None
        if node is not None and not self._frames:
            known = self._places.get(node._sequence_nr())
            if known is not None:
                self.ledger.backward_in(known.module)
                return known
            return _Place("", _frame(), 1)
        frame = self._frames[-1] if self._frames else None
        place = _Place(frame.name if frame else "", _frame(), frame.repeats if frame else 1)
        if self.phase == "forward" or (self.phase == "backward" and torch.is_grad_enabled()):
            self._places.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        return place


# ------------------------------------------------------------------------------------------------------ helpers


@dataclass(frozen=True, slots=True)
class _Schema:
    roles: tuple[str, ...]
    mutates: bool
    written: frozenset[str]


@cache
def _schema(func: Any) -> _Schema:
    arguments = func._schema.arguments
    first = arguments[0] if arguments else None
    mutates = first is not None and first.alias_info is not None and first.alias_info.is_write
    written = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return _Schema(tuple(argument.name for argument in arguments), mutates, frozenset(written))


def _tensors(func: Any, args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    roles = _schema(func).roles
    for position, value in enumerate(args):
        _add(found, roles[position], value)
    for name, value in kwargs.items():
        _add(found, name, value)
    return found


def _add(found: list[tuple[str, torch.Tensor]], role: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.append((role, value))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                found.append((f"{role}[{index}]", item))


def _leaves(result: Any) -> Iterator[Any]:
    if isinstance(result, (list, tuple)):
        for item in result:
            yield from _leaves(item)
    else:
        yield result


def _overflow(name: str, args: Any) -> Breach | None:
    """The breach of filling a tensor with a number that its dtype does not hold."""
    if name not in _FILLS or isinstance(args[2], torch.Tensor) or args[0].dtype not in _FLOATS:
        return None
    value = float(args[2])
    if not math.isfinite(value) or abs(value) <= torch.finfo(args[0].dtype).max:
        return None
    spelled = {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.float32: "float"}
    said = f"value cannot be converted to type {spelled.get(args[0].dtype, args[0].dtype)} without overflow"
    return Breach(said, False, None)


def _tells(operand: Operand) -> int:
    """Rank of an operand as the source of a dtype: lower tells more.

    An empty or filled tensor took its dtype from Python code, and a gradient takes that of the forward's value; what
    they are joined with tells more.
    """
    kinds = {step.kind for step in operand.origin.way()}
    return 2 if operand.origin.cause.kind == "constant" else 1 if "gradient" in kinds else 0


def _is_real(leaf: Any) -> bool:
    """Whether it is a tensor with values, not a fake nor what vmap makes of one."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(leaf)


def _as_measured(result: Any, dtypes: Sequence[torch.dtype]) -> Any:
    made = list(_leaves(result))
    if len(made) != len(dtypes) or all(
        not isinstance(leaf, torch.Tensor) or leaf.dtype == dtype
        for leaf, dtype in zip(made, dtypes, strict=True)
    ):
        return result
    cast = [
        aten._to_copy.default(leaf, dtype=dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf, dtype in zip(made, dtypes, strict=True)
    ]
    return tuple(cast) if isinstance(result, (list, tuple)) else cast[0]


_DTYPE_WORDS = re.compile(r"d?type|BFloat16|\bHalf\b|\bFloat\b|c10::|not implemented for '", re.IGNORECASE)


def says_dtypes(error: Exception) -> bool:
    """Whether an error's own words are about dtypes."""
    return _DTYPE_WORDS.search(str(error)) is not None


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(__file__).parents[1]
# What asks for operators on behalf of the model's and the script's code.
_OURS = tuple(str(_PACKAGE / part) for part in ("trace", "commands", "fixes", "model", "preflight.py"))


@cache
def _is_library(filename: str) -> bool:
    return filename.startswith((_TORCH, *_OURS, "<frozen"))


def _innermost(error: Exception) -> Any:
    """The innermost frame of an error's traceback outside of torch and this package."""
    found, step = None, error.__traceback__
    while step is not None:
        if not _is_library(step.tb_frame.f_code.co_filename):
            found = step.tb_frame
        step = step.tb_next
    return found


def _frame() -> Any:
    """(file, line) of the innermost frame outside of torch and this package: what asked for the operator."""
    frame = sys._getframe(2)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@cache
def _shown(source: Any) -> str:
    if source is None:
        return ""
    return f"{source[0]}:{source[1]}"
