"""The recorder of a step on fake tensors: judges every operator, and continues after a broken contract.

It is above `FakeTensorMode`. Values that code branches on get stand-ins; operands that a device would refuse
are recorded, converted as the policy would, and passed on.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from isotype.compat.torch import (
    FakeTensor,
    FakeTensorMode,
    is_transformed_tensor,
    unset_fake_temporarily,
    without_functions,
    without_modes,
)
from isotype.contracts.contract import Contracts, is_exempt
from isotype.contracts.families import by_shapes
from isotype.contracts.pattern import CORRUPTS
from isotype.core.errors import first_line
from isotype.core.operators import (
    BFLOAT16_WITHOUT_MEMORY,
    given_tensors,
    leaves,
    operator_name,
    schema_of,
    tensors_in,
)
from isotype.core.source import condition_at, raising_line, shown, tensors_at_hand
from isotype.records.trace import FLOATS, SHARED, UNSAFE, Breach, Failure, Operand, Origin
from isotype.trace.fake.arguments import (
    as_measured,
    converted,
    made_in,
    map_leaves,
    numbers_of,
    overflow,
    without_numbers,
)
from isotype.trace.fake.code import named_arguments
from isotype.trace.fake.gradients import Gradients
from isotype.trace.fake.kernels import Kernels, refusal
from isotype.trace.fake.reach import InputReach
from isotype.trace.fake.twin import fake_like, forget_fakes
from isotype.trace.fake.values import LIMIT, Values, fakes_of, is_data_dependent
from isotype.trace.recorder import Place, Recorder, width
from isotype.trace.sides import Sides

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default

# Functions that support float16 on a GPU (in sizes of a power of two) and no 16 bits on a CPU
# (`promote_type_fft` in aten/src/ATen/native/SpectralOps.cpp).
_CPU_LACKS_HALF = "fft_"
# Operators of an angle: its absolute error counts, however large it is.
_CIRCULAR = frozenset({aten.sin.default, aten.cos.default})
# Final operators of `torch.tensor`: the mode would keep the number as a constant, and compute with it itself.
_LIFTS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})
# Operators of `Module.to`, whose results replace the parameters.
_MAKE_PARAMETERS = frozenset({aten._to_copy.default, aten.detach.default, aten.alias.default})

_NOT_REAL = (FakeTensor, int, float, str, type(None), torch.dtype, torch.device)


class TimeSpentError(RuntimeError):
    """The deadline of the trace has passed."""


class FakeRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records one step on fakes.

    Args:
        contracts: of the device.
        compute: dtype to which breached operands are converted if nothing else decides.
        fake: the mode of its tensors.
        lines: `file:line` -> dtype for casts and new tensors of this line, and for operands of its mixed
            calls: a code change to try.

    Attributes:
        sides: decides to which of several dtypes operands are converted; `compute` until weights are
            known.
        deadline: of the step, in seconds of `time.monotonic`; the next operator after it ends the step.
        gradients: the trainable parameters that they reach.
        reach: the inputs that may reach the loss.
    """

    def __init__(
        self,
        contracts: Contracts,
        compute: torch.dtype,
        fake: FakeTensorMode,
        lines: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__()
        self.contracts = contracts
        self.compute = compute
        self.sides = Sides(compute, True, {})
        self.fake = fake
        self.kernels = Kernels(fake)
        self.lines = lines or {}
        self.deadline = math.inf
        self.values = Values()
        self.gradients = Gradients()
        self.reach = InputReach()
        self._outside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._brings: dict[int, tuple[torch.Tensor, str]] = {}

    # ----------------------------------------------------------------------------------------------- what is given

    def watch(self, model: nn.Module) -> list[Any]:
        """Add hooks as any recorder, and register real tensors that the model is called with as inputs.

        Plain tensors of modules get names too: the model's `.to()` does not move them.
        """
        handles = super().watch(model)
        if not isinstance(model, torch.jit.ScriptModule):
            handles.append(model.register_forward_pre_hook(self._note_inputs, with_kwargs=True, prepend=True))
        self._own_plain_tensors(model)
        return handles

    def leave(self, arguments: Any = (), output: Any = None) -> None:
        """Leave a module as any recorder; its output may require a gradient if gradients are on."""
        if self.phase == "forward" and torch.is_grad_enabled() and self._frames:
            self.gradients.behind.append(self._frames[-1].name)
        super().leave(arguments, output)

    def knows(self, model: nn.Module, twin: nn.Module, brought: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Register before the step the fakes of the real model's weights, and tensors of the loss.

        Args:
            model: the real one.
            twin: its weights have the same names.
            brought: tensors of the loss, by name.
        """
        self._brings = {id(tensor): (tensor, name) for name, tensor in brought}
        fakes = dict(_tensors(twin))
        for name, tensor in _tensors(model):
            if name in fakes and _is_real(tensor):
                self._outside[id(tensor)] = (tensor, fakes[name])

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Register real tensors in a call of the model (by the caller's loss) as its inputs."""
        # Reading a tensor's dtype is a function call too, which would swap it before it has its name.
        with without_functions():
            for name, value in named_arguments(module, args, kwargs):
                if _is_real(value):
                    self.stand_for(value, Origin("input", value.dtype, name))
        return self.swapped(args), self.swapped(kwargs)

    def swapped(self, values: Any) -> Any:
        """Return values with every real tensor replaced by its fake, which takes the step's writes."""
        flat = values.values() if isinstance(values, dict) else values
        if isinstance(values, (tuple, list, dict)) and all(isinstance(value, _NOT_REAL) for value in flat):
            return values  # most calls, ten times faster

        def swap(leaf: Any) -> Any:
            return self.stand_for(leaf) if _is_real(leaf) else leaf

        return map_leaves(swap, values)

    def stand_for(self, tensor: torch.Tensor, origin: Origin | None = None) -> torch.Tensor:
        """Return the fake of a real tensor from outside of the twin, always the same."""
        known = self._outside.get(id(tensor))
        if known is None:
            with without_modes():
                fake = fake_like(tensor.detach(), self.fake).requires_grad_(tensor.requires_grad)
                if tensor.numel() <= LIMIT and not tensor.is_meta:
                    self.values.give(fake, tensor.detach().cpu().clone())
            self._outside[id(tensor)] = known = (tensor, fake)
            self.mark(fake, origin or self._brought(tensor))
        return known[1]

    def _brought(self, tensor: torch.Tensor) -> Origin:
        """Return the origin of a real tensor: data of the loss, or in a module, kept by its code."""
        if id(tensor) in self._brings:
            return Origin("data", tensor.dtype, self._brings[id(tensor)][1])
        unknown = self._unknown(tensor)
        return (
            unknown if self._frames or unknown.kind != "outside" else replace(unknown, kind="data", name="")
        )

    # ------------------------------------------------------------------------------------------------- dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            # The operator of `tensor.device`; FakeTensor's implementation takes two more dispatches.
            if func is _DEVICE and isinstance(args[0], FakeTensor) and not self.fake.in_kernel_invocation:
                return args[0].fake_device
            return func(*args, **(kwargs or {}))
        if time.monotonic() > self.deadline:
            raise TimeSpentError("the time for the trace was spent")
        # Function modes see the model's calls, not those of this recorder and the fake kernels.
        with without_functions():
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        place = self._place()
        edited = self._edited(place)
        # A cast without a function in the backward is autograd's, fitting a gradient to its value.
        by_autograd = self.phase == "backward" and not self.function and not self._frames
        if edited is not None and kwargs.get("dtype") in FLOATS and not by_autograd:
            kwargs = {**kwargs, "dtype": edited}
        tensors = tensors_in(func, args, kwargs)
        breach: Breach | None = None
        value = self.values.compute(func, args, kwargs, tensors)
        if value is not None:
            self.values.follow_rounding(func, args, kwargs, tensors, value, shown(place.source))
        if value is not None and (is_data_dependent(func) or (func in _LIFTS and _is_real(args[0]))):
            result = fakes_of(value, self.values, self.fake)
        else:
            result, breach = self._judged(func, args, kwargs, tensors, edited)
            if edited is not None and not any(tensor.dtype in FLOATS for _, tensor in tensors):
                result, value = made_in(edited, result), made_in(edited, value)
            self._keep(func, tensors, result, value)
        if breach is not None and not tensors:
            tensors = [("result", result)]  # it creates a tensor from numbers, which do not fit it
        self._write(func, args, kwargs, tensors, result, place, breach)
        if self.phase == "forward":
            self.gradients.used(func, tensors, result, self.names, place)
            self.reach.follow(func, tensors, result)
        if func in _CIRCULAR and value is not None:
            off, rounded = self.values.rounding(tensors[0][1])
            self.calls[-1] = replace(self.calls[-1], off=off, rounded_at=rounded)
        if func is torch.ops.aten._to_copy.default and value is not None:
            self.calls[-1] = replace(self.calls[-1], emptied=self.values.emptied(tensors[0][1], value))
        if func in _MAKE_PARAMETERS:
            forget_fakes(self.fake)
        return result

    def _edited(self, place: Place) -> torch.dtype | None:
        """Return the dtype of an edited line; None if the code is unchanged."""
        return self.lines.get(shown(place.source)) if self.lines else None

    def _judged(
        self, func: Any, args: Any, kwargs: Any, tensors: Any, edited: torch.dtype | None
    ) -> tuple[Any, Breach | None]:
        name = operator_name(func)
        numbers = numbers_of(name, self.contracts.kind)
        too_large = overflow(func, args, kwargs, numbers) if numbers else None
        if too_large is not None and edited == torch.float32:
            return self._run_converted(func, args, kwargs, edited), None
        if too_large is not None:
            args, kwargs = without_numbers(func, args, kwargs, numbers)
            return self._run(func, args, kwargs, tensors, edited)[0], too_large
        verdict = self.contracts.judge(name, tuple(tensor.dtype for _, tensor in tensors))
        if verdict is None or (not verdict.accepted and is_exempt(name, args)):
            return self._run(func, args, kwargs, tensors, edited)
        if verdict.accepted:
            if name in BFLOAT16_WITHOUT_MEMORY:
                return self._as_bfloat16(func, args, kwargs, tensors), None
            result, breach = self._run(func, args, kwargs, tensors, edited)
            # If a fake kernel returns another dtype than measured, the measured one counts (mixed norms, some
            # losses).
            mixed = len({tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS}) > 1
            return (as_measured(result, verdict.results) if mixed and not breach else result), breach
        if verdict.message == CORRUPTS:
            result, breach = self._run(func, args, kwargs, tensors, edited)
            return result, breach or Breach(CORRUPTS, verdict.assumed, torch.float32)
        target, fixed = self._target(func, tensors, edited)
        message = refusal(func, args, kwargs) if self.contracts.kind == "cpu" else None
        message = message or by_shapes(name, args, verdict.message)
        breach = None if fixed else Breach(message, verdict.assumed, target)
        return self._run_converted(func, args, kwargs, target), breach

    def _as_bfloat16(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        """Run a fake kernel limited to bfloat16 for an operator with more dtypes; return the original dtype."""
        dtype = next(tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS)
        return aten._to_copy.default(self._run_converted(func, args, kwargs, torch.bfloat16), dtype=dtype)

    def _keep(self, func: Any, tensors: Any, result: Any, value: Any) -> None:
        """Store the results' values if known; forget values overwritten by unknown ones."""
        if value is not None:
            for fake, real in zip(leaves(result), leaves(value), strict=True):
                if isinstance(fake, torch.Tensor):
                    self.values.give(fake, real)
        else:
            self.values.succeed(func, result)
            written = schema_of(func).written
            for role, tensor in tensors:
                if role.partition("[")[0] in written:
                    self.values.forget(tensor)

    def _run(
        self, func: Any, args: Any, kwargs: Any, tensors: Any, edited: torch.dtype | None
    ) -> tuple[Any, Breach | None]:
        """Run an operator; if the fake kernel refuses mixed dtypes, record the breach and convert."""
        try:
            other = self.values.stand_in(func, args, kwargs)
            return other(*args, **kwargs) if other else self.kernels.run(func, args, kwargs), None
        except Exception as error:
            floats = {tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS}
            if len(floats) < 2 or not says_dtypes(error):
                raise
            target, fixed = self._target(func, tensors, edited)
            breach = None if fixed else Breach(first_line(error), False, target)
            return self._run_converted(func, args, kwargs, target), breach

    def _target(
        self, func: Any, tensors: Sequence[tuple[str, torch.Tensor]], edited: torch.dtype | None
    ) -> tuple[torch.dtype, bool]:
        """Return the dtype to convert to, and whether the edited line does it itself.

        That of a written operand, which no cast changes; else the edit's; else that of operands not shared
        with other code; else that of the part of the model; else the widest.
        """
        floats = [tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS]
        if schema_of(func).mutates and tensors and tensors[0][1].dtype in FLOATS:
            return tensors[0][1].dtype, tensors[0][1].dtype == edited
        if edited is not None:
            return edited, True
        side = self._side(tensors)
        alike = tuple(side if tensor.dtype in FLOATS else tensor.dtype for _, tensor in tensors)
        verdict = self.contracts.judge(operator_name(func), alike)
        if len(set(floats)) == 1 or not (verdict is None or verdict.accepted):
            return torch.float32, False  # no kernel for this dtype; float32 has one
        own = {
            tensor.dtype
            for _, tensor in tensors
            if tensor.dtype in FLOATS and self.origin(tensor).cause.kind not in SHARED
        }
        if len(own) == 1:
            return own.pop(), False  # the model's dtype, not that of a shared tensor
        return side if side in floats else max(floats, key=width, default=side), False

    def _side(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> torch.dtype:
        """Return the dtype of the part of the model where the float tensors meet."""
        floats = [tensor for _, tensor in tensors if tensor.dtype in FLOATS]
        causes = [self.origin(tensor).cause for tensor in floats if tensor.dim()]
        return self.sides.at(self._place().module, causes or [self.origin(tensor).cause for tensor in floats])

    def _run_converted(self, func: Any, args: Any, kwargs: Any, target: torch.dtype) -> Any:
        if schema_of(func).mutates and isinstance(args[0], torch.Tensor) and args[0].dtype != target:
            return args[0]
        if schema_of(func).mutates and args and isinstance(args[0], (list, tuple)):
            return None  # a list of tensors written in place: only the old values flow on
        other = self.values.stand_in(func, args, kwargs)
        return (other or func)(
            *(converted(value, target) for value in args),
            **{name: converted(value, target) for name, value in kwargs.items()},
        )

    # ---------------------------------------------------------------------------------------- above the operators

    def composite(self, func: Any, args: Any, kwargs: Any, error: Exception) -> torch.dtype | None:
        """Record a function that refused its operands before any operator; return the dtype to go on with."""
        tensors = given_tensors(args, kwargs)
        floats = {tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS}
        # Autocast refuses another 16-bit dtype than its own when promoting (at::autocast::prioritize).
        cast = torch.get_autocast_dtype("cpu") if "autocast" in str(error) else None
        alone = len(floats) + (cast is not None) < 2
        # For a 16-bit dtype that a function does not support (`torch.fft`, `torch.quantile`) use float32's
        # kernel.
        if not floats or not says_dtypes(error) or (alone and not self._lacks(func, floats)):
            return None
        edited = self._edited(self._place())
        if edited is not None:
            return edited
        widest, side = max(floats, key=width), self._side(tensors)
        target = cast or (torch.float32 if alone else side if side in floats else widest)
        self.note(
            f"torch.{getattr(func, '__name__', func)}", tensors, Breach(first_line(error), False, target)
        )
        return target

    def _lacks(self, func: Any, floats: set[torch.dtype]) -> bool:
        """Return whether the simulated device also lacks a function refused here for its only dtype."""
        here_alone = self.contracts.kind != "cpu" and getattr(func, "__name__", "").startswith(
            _CPU_LACKS_HALF
        )
        return max(map(width, floats)) < 4 and not (here_alone and torch.float16 in floats)

    def banned(self, name: str, args: Any, kwargs: Any) -> None:
        """Record a function that autocast refuses, unless an edit of the calling line disables autocast."""
        if self._edited(self._place()) is None:
            breach = Breach(f"torch.nn.functional.{name} {UNSAFE}", False, torch.float32)
            self.note(f"torch.{name}", given_tensors(args, kwargs), breach)

    def array(self, tensor: torch.Tensor) -> Any:
        """Return zeros for `tensor.numpy()`; bfloat16 is a breach, since NumPy lacks it."""
        dtype = tensor.dtype
        if dtype == torch.bfloat16:
            dtype = torch.float32
        if dtype != tensor.dtype and self._edited(self._place()) is None:
            breach = Breach("Got unsupported ScalarType BFloat16", False, dtype)
            self.note("torch.Tensor.numpy", [("self", tensor)], breach)
        known = self.values.of(tensor)
        with without_modes():
            return (torch.zeros(tensor.shape, dtype=dtype) if known is None else known.to(dtype)).numpy()

    def listed(self, tensor: torch.Tensor) -> Any:
        """Return the known values for `tensor.tolist()`, else ones (True)."""
        known = self.values.of(tensor)
        with unset_fake_temporarily():
            return (torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known).tolist()

    def failure(self, error: Exception) -> Failure:
        """Return the failure that ended the step, with its place."""
        frame = self._raised_in or (self._frames[-1] if self._frames else None)
        source = raising_line(error)
        text = f"{type(error).__name__}: {first_line(error)}"
        with without_functions():
            operands = tuple(
                Operand(name, value.dtype, tuple(value.shape), self.origin(value))
                for name, value in tensors_at_hand(error)
                if value.dtype in FLOATS
            )
        mixed = len({operand.dtype for operand in operands}) > 1
        # A parameter cast by the forward is another object here; the real step keeps it.
        ours = "poisoned by swap_tensors" in text
        if ours:
            text = "a backward behind a module that its own forward moves by .to() cannot be traced"
        ours = ours or isinstance(error, TimeSpentError)
        differs = isinstance(error, CheckpointError)
        again = self.phase == "backward" and (differs or frame is not None) and not ours
        name, condition = frame.name if frame else "", condition_at(source)
        return Failure(self.phase, name, source, text, mixed, operands, again, condition)


# ------------------------------------------------------------------------------------------------------- helpers


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _is_real(leaf: Any) -> bool:
    """Return whether a leaf is a tensor with values, not a fake or a vmap wrapper of one."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
        return False
    return not is_transformed_tensor(leaf)


_DTYPE_WORDS = re.compile(
    r"d?type|\bHalf\b|\bb?float\b|\bb?float[ -]?\d\d|\b(?:bf|fp)[ -]?\d\d|c10::|not implemented for '",
    re.IGNORECASE,
)


# C++'s format of a tensor: `CPUBFloat16Type{[2, 16]}`, in any message.
_PRINTED = re.compile(r"\S*(?=\{\[)")


def says_dtypes(error: Exception) -> bool:
    """Return whether an error message is about dtypes."""
    return _DTYPE_WORDS.search(_PRINTED.sub("", str(error))) is not None
