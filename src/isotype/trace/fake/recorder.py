"""The recorder of a step on fake tensors: it checks every operator, and continues after a broken contract.

The recorder is a dispatch mode above `FakeTensorMode`. If code branches on an unknown value, the recorder assumes a
value. If the device would refuse an operator's operands because of their dtypes, the recorder records a breach,
converts the operands and continues.
"""

import math
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import attrgetter
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from isotype.compat.torch import FakeTensor, unset_fake_temporarily, without_functions, without_modes
from isotype.contracts.contract import NO_FLOAT8, Contracts, is_exempt
from isotype.contracts.families import by_shapes
from isotype.contracts.pattern import CORRUPTS
from isotype.core.dtypes import FLOATS, named_integer
from isotype.core.errors import error_line, first_line
from isotype.core.operators import BFLOAT16_WITHOUT_MEMORY, float_indices, given_tensors, leaves, schema_of
from isotype.core.source import condition_at, raising_line, shown, tensors_at_hand
from isotype.precision.devices.simulated import SimulatedMode
from isotype.records.trace import ONLY_WIDE, SHARED, UNSAFE, Breach, Failure, Origin, OriginKind
from isotype.trace.fake.arguments import (
    as_measured,
    cast_result,
    in_operands_dtype,
    is_real,
    map_leaves,
    numbers_of,
    overflow,
    with_tensors_in,
    without_floats,
    without_numbers,
    wraps_fakes,
)
from isotype.trace.fake.code import named_arguments
from isotype.trace.fake.kernels import Kernels, refusal
from isotype.trace.fake.known import Known
from isotype.trace.fake.reach import Gradients, InputReach
from isotype.trace.fake.twin import fake_like
from isotype.trace.fake.values import LIMIT, ROUNDED, Values, fakes_of, is_data_dependent
from isotype.trace.operator_call import CallPlace, OperatorCall
from isotype.trace.recorder import LIFTS, Recorder
from isotype.trace.sides import Sides

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default

_NOT_REAL = frozenset({FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device})


class TimeSpentError(RuntimeError):
    """The deadline of the trace has passed before the step ended."""


class FakeRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records one step on fake tensors.

    Args:
        compute: dtype to which the operands of a breach are converted by default.
        lines: code changes to try, `file:line` -> dtype. At such a line, casts and new tensors get the dtype, and
            operands of mixed dtypes are converted to it.

    Attributes:
        sides: chooses the dtype to which operands of mixed dtypes are converted. By default, it chooses `compute`.
        deadline: latest end of the step by `time.monotonic`, in seconds. A later operator raises TimeSpentError.
    """

    def __init__(
        self,
        contracts: Contracts,
        compute: torch.dtype,
        fake: SimulatedMode,
        lines: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__(contracts.kind)
        self.contracts = contracts
        self.compute = compute
        self.sides = Sides(compute)
        self.fake = fake
        self.kernels = Kernels(fake)
        self.lines = lines or {}
        self.deadline = math.inf
        self.values = Values()
        self.known = Known(self.values)
        self.gradients = Gradients()
        self.reach = InputReach()
        self.fake.thread = threading.get_ident()
        self._outside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._named: dict[int, tuple[torch.Tensor, Origin]] = {}

    # -------------------------------------------------------------------------------------- tensors from outside

    def watch(self, model: nn.Module) -> ExitStack:
        """Add the recorder's hooks, and name the tensors in arguments of calls and in plain attributes of modules."""
        hooks = super().watch(model)
        if not isinstance(model, torch.jit.ScriptModule):
            noting = model.register_forward_pre_hook(self._note_inputs, with_kwargs=True, prepend=True)
            hooks.enter_context(noting)
        self._register_plain_tensors(model)
        return hooks

    def leave(self, arguments: Any = (), output: Any = None) -> None:
        """Call `Recorder.leave`, and record the module's name if its output may require a gradient."""
        if self.phase == "forward" and torch.is_grad_enabled() and self._frames:
            self.gradients.behind.append(self._frames[-1].name)
        super().leave(arguments, output)

    def register_named(self, kind: OriginKind, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Before the step, register (name, tensor) of real tensors outside of the model: inputs, and data of the loss."""
        for name, tensor in tensors:
            self._named[id(tensor)] = tensor, Origin(kind, tensor.dtype, name)

    def register_model(self, model: nn.Module, twin: nn.Module) -> None:
        """Before the step, register the model's tensors. If the code uses one, the twin's tensor of this name replaces it."""
        tensors, fakes = (
            [*m.named_parameters(remove_duplicate=False), *m.named_buffers(remove_duplicate=False)]
            for m in (model, twin)
        )
        fake_by_name = dict(fakes)
        for name, tensor in tensors:
            if (fake := fake_by_name.get(name)) is None or not is_real(tensor):
                continue
            buffer = not isinstance(tensor, nn.Parameter) and id(tensor) not in self._outside
            self._outside[id(tensor)] = (tensor, fake)
            if buffer and not tensor.is_meta and tensor.numel() <= LIMIT:
                self.values.give(fake, tensor.detach().cpu().clone())
                self.values.came_rounded(fake, name, written=True)

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Register the real tensors that the caller's loss passes to the model as inputs."""
        # Reading `value.dtype` is a function call, too. The function mode would replace `value` by a fake before `value`
        # has its name.
        with without_functions():
            for name, value in named_arguments(module, args, kwargs):
                if is_real(value):
                    self.stand_for(value, Origin("input", value.dtype, name))
        return self.swapped(args), self.swapped(kwargs)

    def swapped(self, values: Any) -> Any:
        """Return `values` with fakes in place of all real tensors, so that the step writes into the fakes."""
        flat = values.values() if isinstance(values, dict) else values
        if isinstance(values, (tuple, list, dict)) and _NOT_REAL.issuperset(map(type, flat)):
            return values  # most calls, ten times faster
        return map_leaves(lambda leaf: self.stand_for(leaf) if is_real(leaf) else leaf, values)

    def stand_for(self, tensor: torch.Tensor, origin: Origin | None = None) -> torch.Tensor:
        """Return the fake that replaces a real tensor. A second call with the same tensor returns the same fake."""
        if id(tensor) not in self._outside:
            with without_modes():
                fake = fake_like(tensor.detach(), self.fake).requires_grad_(tensor.requires_grad)
                if not tensor.is_meta:
                    self.known.give(fake, tensor.detach().cpu())
                if tensor.numel() <= LIMIT and not tensor.is_meta:
                    self.values.give(fake, tensor.detach().cpu().clone())
            self._outside[id(tensor)] = (tensor, fake)
            self.mark(fake, origin or self._origin_outside(tensor))
        return self._outside[id(tensor)][1]

    def _origin_outside(self, tensor: torch.Tensor) -> Origin:
        """Return the origin of a real tensor: the data of the loss function, or an attribute of a module."""
        if id(tensor) in self._named:
            return self._named[id(tensor)][1]
        origin = self._unknown(tensor)
        return origin if self._frames or origin.kind != "outside" else replace(origin, kind="data", name="")

    # ------------------------------------------------------------------------------------------------- dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            # The operator of `tensor.device`: FakeTensor's implementation would dispatch two more operators.
            if func is _DEVICE and isinstance(args[0], FakeTensor) and not self.fake.in_kernel_invocation:
                return args[0].fake_device
            return func(*args, **(kwargs or {}))
        if any(hasattr(kind, "__tensor_flatten__") for kind in types) and any(map(wraps_fakes, leaves(args))):
            return NotImplemented  # the wrapper's class runs operators on the fake tensors inside
        if time.monotonic() > self.deadline:
            raise TimeSpentError("the time limit of the trace was reached")
        # Function modes must get the model's calls, not the calls of this recorder and the fake kernels.
        with without_functions():
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        place = self._place()
        edited = self.edited(place)
        # In the backward, autograd itself casts a gradient to its value's dtype.
        by_autograd = self.phase == "backward" and not self.function and not self._frames
        if edited is not None and kwargs.get("dtype") in FLOATS and not by_autograd:
            kwargs = {**kwargs, "dtype": edited}
        call = OperatorCall(func, args, kwargs, place)
        value = self.values.compute(call)
        if value is not None:
            self.values.track_rounding(call, value)
        # `FakeTensorMode` would keep the number of `torch.tensor` as a constant and compute with it.
        if value is not None and (is_data_dependent(func) or (func in LIFTS and is_real(args[0]))):
            result = fakes_of(value, self.values, self.fake)
        else:
            result = self._checked(call)
            if edited is not None and not call.floats:
                result, value = cast_result(edited, result), cast_result(edited, value)
            self._keep(call, result, value)
        if call.breach is not None and not call.tensors:
            call.tensors = [("result", result)]  # a new tensor, whose dtype is too small for its numbers
        decided = self.known.decide(call, result, self.calls)
        self._write(call, result)
        # Code in the backward may run a forward again with gradients on: recomputation, or GradCache.
        if self.phase == "forward" or torch.is_grad_enabled():
            self.gradients.used(call, result, self.names)
        if self.phase == "forward":
            self.reach.record(call, result)
        self.values.select(call, result)
        if func in ROUNDED:
            decided["off"], decided["rounded_at"] = self.values.rounding(call, value)
        if value is not None and func is aten._to_copy.default:
            decided["emptied"] = self.values.emptied(call.tensors[0][1], value)
        if decided:
            self.calls[-1] = replace(self.calls[-1], **decided)
        return result

    def edited(self, place: CallPlace | None = None) -> torch.dtype | None:
        """Return the dtype that a code change sets at the line of `place` (default: the running line); None without a change."""
        return self.lines.get(shown((place or self._place()).source)) if self.lines else None

    def _checked(self, call: OperatorCall) -> Any:
        """Return the result of an operator. If it breaks its contract, set `call.breach` and convert the operands."""
        name, args = call.name, call.args
        numbers = numbers_of(name, self.contracts.kind)
        too_large = overflow(call, numbers) if numbers else None
        if too_large is not None and self.edited(call.place) == torch.float32:
            return self._run_converted(call, torch.float32)
        if too_large is not None:
            call.breach = too_large
            return self._run(without_numbers(call, numbers))
        dtypes = tuple(tensor.dtype for _, tensor in call.tensors)
        verdict = self.contracts.judge(name, dtypes)
        refused = None
        if verdict is not None and not verdict.accepted:
            refused = Breach(verdict.message, verdict.assumed, None)
        if float_indices(name, dtypes):
            call.breach = refused
            return self._checked(call.but(*without_floats((args, call.kwargs), call.tensors, name)))
        if verdict is None or (not verdict.accepted and is_exempt(name, args, self.contracts.kind)):
            return self._run(call)
        if verdict.accepted:
            if name in BFLOAT16_WITHOUT_MEMORY:
                dtype = call.floats[0].dtype
                return aten._to_copy.default(self._run_converted(call, torch.bfloat16), dtype=dtype)
            result = self._run(call)
            # Fake kernels of mixed norms and some losses return another dtype than the one measured on the device.
            mixed = len(FLOATS.intersection(dtypes)) > 1
            return as_measured(result, verdict.results) if mixed and not call.breach else result
        if any(dtype.is_complex for dtype in dtypes):  # no cast of a float operand helps
            self._run(call)  # its own error, if it raises one
            raise RuntimeError(by_shapes(name, args, verdict.message))
        if named_integer(verdict.message, dtypes) is not None:
            call.breach = refused
            return self._without_integers(call)
        if verdict.message in (CORRUPTS, NO_FLOAT8):  # no cast of the operands helps
            result = self._run(call)
            call.breach = call.breach or Breach(verdict.message, verdict.assumed, torch.float32)
            return result
        target, fixed = self._target(call)
        fixed = fixed and self._accepts(call, target)
        message = refusal(call.func, args, call.kwargs) if self.contracts.kind == "cpu" else None
        message = message or by_shapes(name, args, verdict.message)
        call.breach = None if fixed else Breach(message, verdict.assumed, target)
        return in_operands_dtype(self._run_converted(call, target), call.tensors, target)

    def _without_integers(self, call: OperatorCall) -> Any:
        """Run an operator that refuses an integer operand, after a cast of this operand to the float operands' dtype."""
        if schema_of(call.func).mutates:
            return call.args[0]
        if not call.floats or "nll_loss" in call.name:
            return self.kernels.run(call.func, call.args, call.kwargs)  # the fake kernel accepts the operand

        dtype, integers = call.floats[0].dtype, {tensor.dtype for _, tensor in call.tensors} - FLOATS
        args, kwargs = with_tensors_in(dtype, (call.args, call.kwargs), integers, partial(self._cast, dtype))
        return call.func(*args, **kwargs)

    def _keep(self, call: OperatorCall, result: Any, value: Any) -> None:
        """Store the values of an operator's results. If `value` is None, forget the values of overwritten tensors."""
        if value is not None:
            for fake, real in zip(leaves(result), leaves(value), strict=True):
                if isinstance(fake, torch.Tensor):
                    self.values.give(fake, real)
        else:
            self.values.succeed(call.func, result)
            for tensor in call.written:
                self.values.forget(tensor)

    def _run(self, call: OperatorCall) -> Any:
        """Run an operator. If its fake kernel raises for mixed dtypes, set `call.breach` and convert the operands."""
        try:
            return self._computed(call, call.args, call.kwargs)
        except Exception as error:
            if len({tensor.dtype for tensor in call.floats}) < 2 or not is_about_dtypes(error):
                raise
            target, fixed = self._target(call)
            call.breach = None if fixed else Breach(first_line(error), False, target)
            return self._run_converted(call, target)

    def _target(self, call: OperatorCall) -> tuple[torch.dtype, bool]:
        """Return (dtype to which operands are converted, whether it comes from a code change in `lines`).

        The first of these rules that applies decides:

        - the dtype of the operand that the operator overwrites, because a cast cannot change this operand;
        - the dtype of the tried code change;
        - float32 if the operator has no kernel for the dtype that `sides` chooses;
        - the dtype of the operands that belong to the model, if all of these operands have one dtype;
        - the dtype that `sides` chooses if one of the operands has this dtype;
        - the widest dtype of the operands.
        """
        edited, dtypes = self.edited(call.place), [tensor.dtype for tensor in call.floats]
        if schema_of(call.func).mutates and call.tensors and call.tensors[0][1].dtype in FLOATS:
            return dtypes[0], dtypes[0] == edited
        if edited is not None:
            return edited, True
        side = self._side(call.floats)
        if len(set(dtypes)) == 1 or not self._accepts(call, side):
            return torch.float32, False  # the operator has a kernel for float32, and none for this dtype
        of_model = {tensor.dtype for tensor in call.floats if self.origin(tensor).cause.kind not in SHARED}
        if len(of_model) == 1:
            return of_model.pop(), False
        return side if side in dtypes else max(dtypes, key=attrgetter("itemsize"), default=side), False

    def _accepts(self, call: OperatorCall, dtype: torch.dtype) -> bool:
        """Return whether the device runs the operator with all float operands in `dtype`; True if unknown."""
        alike = (dtype if tensor.dtype in FLOATS else tensor.dtype for _, tensor in call.tensors)
        return self.contracts.refusal(call.name, alike) is None

    def _side(self, floats: Sequence[torch.Tensor]) -> torch.dtype:
        causes = [self.origin(tensor).cause for tensor in floats if tensor.dim()]
        return self.sides.at(self._place().module, causes or [self.origin(tensor).cause for tensor in floats])

    def _run_converted(self, call: OperatorCall, target: torch.dtype) -> Any:
        written = call.args[0] if schema_of(call.func).mutates and call.args else None
        if isinstance(written, torch.Tensor) and written.dtype != target:
            return written
        if isinstance(written, (list, tuple)):
            return None  # the operator writes a list of tensors in place: the list keeps its old values
        return self._computed(
            call, *with_tensors_in(target, (call.args, call.kwargs), cast=partial(self._cast, target))
        )

    def _computed(self, call: OperatorCall, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator with these arguments. The original arguments in `call` may select a stand-in."""
        other = self.values.stand_in(call)
        return other(*args, **kwargs) if other else self.kernels.run(call.func, args, kwargs)

    def _cast(self, dtype: torch.dtype, tensor: torch.Tensor) -> Any:
        return self.kernels.run(aten._to_copy.default, (tensor,), {"dtype": dtype})

    # ---------------------------------------------------------------------------------------- above the operators

    def composite(self, func: Any, args: Any, kwargs: Any, error: Exception) -> torch.dtype | None:
        """Record a function that raised `error` before any operator ran. Return its operands' new dtype; None to raise it.

        int64 is the dtype of indices, and bool the dtype of masks.
        """
        tensors = given_tensors(args, kwargs)
        floats = [tensor for _, tensor in tensors if tensor.dtype in FLOATS]
        dtypes = {tensor.dtype for tensor in floats}
        name = f"torch.{getattr(func, '__name__', func)}"
        if float_indices(name, [tensor.dtype for _, tensor in tensors]) and is_about_dtypes(error):
            self.note(name, tensors, Breach(first_line(error), False, None))
            return torch.int64
        integer = named_integer(str(error), (tensor.dtype for _, tensor in tensors))
        if integer is not None and _ABOUT_MASKS in str(error):
            self.note(name, tensors, Breach(first_line(error), False, torch.bool))
            return torch.bool
        # An autocast list that promotes raises an error for the other 16-bit dtype (at::autocast::prioritize).
        cast = torch.get_autocast_dtype("cpu") if "autocast" in str(error) else None
        alone = len(dtypes) + (cast is not None) < 2
        # A function that does not support the 16-bit dtype (`torch.fft`, `torch.quantile`) runs in float32.
        narrow = all(dtype.itemsize < torch.float32.itemsize for dtype in dtypes)
        if not floats or not is_about_dtypes(error) or (alone and not narrow):
            return None
        if integer is not None:
            return None  # no cast of the float operands helps
        edited = self.edited()
        if edited is not None:
            return edited
        widest, side = max(dtypes, key=attrgetter("itemsize")), self._side(floats)
        wide = alone or ONLY_WIDE in str(error)
        target = cast or (torch.float32 if wide else side if side in dtypes else widest)
        breach = Breach(first_line(error), False, target)
        self.note(name, tensors, breach)
        return target

    def banned(self, name: str, args: Any, kwargs: Any) -> None:
        """Record a function that autocast refuses, unless a tried code change sets the dtype in this line."""
        if self.edited() is None:
            breach = Breach(f"torch.nn.functional.{name} {UNSAFE}", False, torch.float32)
            self.note(f"torch.{name}", given_tensors(args, kwargs), breach)

    def launched(self, kernel: str, values: Any) -> None:
        """Record a Triton kernel, which the trace does not run. Each of its tensors may depend on all others."""
        tensors = given_tensors(values, {})
        self.note(f"triton.{kernel}", tensors)
        for _, tensor in tensors:
            self.values.forget(tensor)
            self.reach.mix(tensor, tensors)

    def array(self, tensor: torch.Tensor) -> Any:
        """Return the result of `tensor.numpy()`: known values or zeros. numpy refuses bfloat16: record a breach."""
        dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
        if dtype != tensor.dtype and self.edited() is None:
            breach = Breach("Got unsupported ScalarType BFloat16", False, dtype)
            self.note("torch.Tensor.numpy", [("self", tensor)], breach)
        value = self.values.of(tensor)
        with without_modes():
            return (torch.zeros(tensor.shape, dtype=dtype) if value is None else value.to(dtype)).numpy()

    def listed(self, tensor: torch.Tensor) -> Any:
        """Return the result of `tensor.tolist()`: the values if they are known, else ones (True for booleans)."""
        value = self.values.of(tensor)
        with unset_fake_temporarily():
            return (torch.ones(tensor.shape, dtype=tensor.dtype) if value is None else value).tolist()

    def failure(self, error: Exception) -> Failure:
        error = self.fake.threaded or error
        frame = self._raised_in or (self._frames[-1] if self._frames else None)
        source = raising_line(error)
        with without_functions():
            tensors = [(name, value) for name, value in tensors_at_hand(error) if value.dtype in FLOATS]
            operands = self.operands(tensors)
        mixed = len({operand.dtype for operand in operands}) > 1
        recomputes = isinstance(error, CheckpointError) or frame is not None
        recomputed = self.phase == "backward" and recomputes and not isinstance(error, TimeSpentError)
        name, condition = frame.name if frame else "", condition_at(source)
        text = error_line(error)
        code = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
        if any(module.startswith("torch.nested") for module in code):
            text = f"NotImplementedError: nested tensors cannot be traced ({text})"
        return Failure(self.phase, name, source, text, mixed, operands, recomputed, condition)


_DTYPE_WORDS = re.compile(
    r"d?type|\bHalf\b|\bb?float\b|\bb?float[ -]?\d\d|\b(?:bf|fp)[ -]?\d\d|c10::|not implemented for '",
    re.IGNORECASE,
)
# C++ prints a tensor as `CPUBFloat16Type{[2, 16]}`, in errors of every kind.
_ABOUT_MASKS = "Expected attn_mask dtype to be bool"
_PRINTED = re.compile(r"\S*(?=\{\[)")


def is_about_dtypes(error: Exception) -> bool:
    return _DTYPE_WORDS.search(_PRINTED.sub("", str(error))) is not None
