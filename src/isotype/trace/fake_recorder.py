"""The recorder of a step on fake tensors: it judges every operator, and goes on where one breaks a contract.

It sits above `FakeTensorMode`. Values that code branches on get stand-ins; operands that a device would refuse are
noted, converted as the policy would, and passed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from isotype.contracts.contract import Contracts, fills
from isotype.trace.fake import fake_like
from isotype.trace.record import FLOATS, Breach, Failure, Operand, Origin
from isotype.trace.recorder import Recorder, _Place, given_tensors, leaves, schema_of, tensors_in, width
from isotype.trace.source import first_line, raising_frame, shown
from isotype.trace.values import LIMIT, Values, fakes_of, is_data_dependent

aten = torch.ops.aten

_FILLS = frozenset({"aten.masked_fill.Scalar", "aten.masked_fill_.Scalar"})
# torch 2.13's fake kernel takes bfloat16 only (`_meta_grouped_mm_common` in torch/_meta_registrations.py); the CPU's and
# CUDA's take float32 and float16 too. tests/trace/test_recorder.py says when this can go.
_FAKE_TOO_STRICT = frozenset({"aten._grouped_mm.default"})


class FakeRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Writes down one step on fakes.

    Args:
        contracts: what the device accepts.
        compute: dtype that breached operands are converted to where nothing else decides.
        fake: the mode its tensors are fakes of.
        lines: `file:line` -> dtype: casts and new tensors that this line asks for get this dtype instead, and what it
            calls with mixed dtypes is converted to it: a change of the code that is to be tried.
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
        self.fake = fake
        self.lines = lines or {}
        self.values = Values()
        self._outside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    # ----------------------------------------------------------------------------------------------- what is given

    def watch(self, model: nn.Module) -> list[Any]:
        """As any recorder does; real tensors that the model is called with become its inputs, too."""
        given = model.register_forward_pre_hook(self._given, prepend=True, with_kwargs=True)
        return [given, *super().watch(model)]

    def _given(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Real tensors that the model is called with (by a loss of the caller's own) are its inputs."""
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
            with _disable_current_modes():
                made = fake_like(tensor.detach(), self.fake).requires_grad_(tensor.requires_grad)
                if tensor.numel() <= LIMIT and not tensor.is_meta:
                    self.values.give(made, tensor.detach().cpu().clone())
            self._outside[id(tensor)] = known = (tensor, made)
            self.mark(made, origin or self._unknown(tensor))
        return known[1]

    # ------------------------------------------------------------------------------------------------- dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        # Function modes see what the model calls, not what this recorder and the fake kernels do.
        with torch._C.DisableTorchFunction():
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        place = self._place()
        if self.lines and kwargs.get("dtype") in FLOATS and shown(place.source) in self.lines:
            kwargs = {**kwargs, "dtype": self.lines[shown(place.source)]}
        tensors = tensors_in(func, args, kwargs)
        breach: Breach | None = None
        value = self.values.compute(func, args, kwargs, tensors)
        if value is not None and is_data_dependent(func):
            result = fakes_of(value, self.values, self.fake)
        else:
            result, breach = self._judged(func, args, kwargs, tensors, place)
            self._keep(func, tensors, result, value)
        self._write(func, args, kwargs, tensors, result, place, breach)
        return result

    def _judged(
        self, func: Any, args: Any, kwargs: Any, tensors: Any, place: _Place
    ) -> tuple[Any, Breach | None]:
        name = str(func)
        overflow = _overflow(name, args)
        if overflow is not None:
            return self._run(func, (*args[:2], 0.0, *args[3:]), kwargs, tensors)[0], overflow
        verdict = self.contracts.judge(name, tuple(tensor.dtype for _, tensor in tensors))
        if verdict is None or (not verdict.accepted and fills(name, args)):
            return self._run(func, args, kwargs, tensors)
        if verdict.accepted:
            if name in _FAKE_TOO_STRICT:
                return self._as_bfloat16(func, args, kwargs, tensors), None
            result, breach = self._run(func, args, kwargs, tensors)
            # Where a fake kernel gets the result's dtype wrong, the measured one counts (mixed norms, some losses).
            mixed = len({tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS}) > 1
            return (_as_measured(result, verdict.results) if mixed and not breach else result), breach
        edited = self.lines.get(shown(place.source)) if self.lines else None
        target = edited or self._target(func, tensors)
        breach = None if edited else Breach(verdict.message, verdict.assumed, target)
        return self._run_converted(func, args, kwargs, target), breach

    def _as_bfloat16(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        """Run a fake kernel that knows only bfloat16 of an operator that takes more, and return what was given."""
        given = next(tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS)
        return aten._to_copy.default(self._run_converted(func, args, kwargs, torch.bfloat16), dtype=given)

    def _keep(self, func: Any, tensors: Any, result: Any, value: Any) -> None:
        """Values of the results where they are known; what something unknown was written into is forgotten."""
        if value is not None:
            for made, real in zip(leaves(result), leaves(value), strict=True):
                if isinstance(made, torch.Tensor):
                    self.values.give(made, real)
        else:
            written = schema_of(func).written
            for role, tensor in tensors:
                if role.partition("[")[0] in written:
                    self.values.forget(tensor)

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> tuple[Any, Breach | None]:
        """Run it as it is; where the fake kernel refuses mixed dtypes, note the breach and convert."""
        try:
            other = self.values.stand_in(func, args, kwargs)
            return (other or func)(*args, **kwargs), None
        except Exception as error:
            floats = {tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS}
            if len(floats) < 2 or not says_dtypes(error):
                raise
            target = self._target(func, tensors)
            return self._run_converted(func, args, kwargs, target), Breach(first_line(error), False, target)

    def _target(self, func: Any, tensors: Sequence[tuple[str, torch.Tensor]]) -> torch.dtype:
        """The dtype to convert to: that of what an operator writes into, else the policy's, else the widest."""
        floats = [tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS]
        if schema_of(func).mutates and tensors and tensors[0][1].dtype in FLOATS:
            return tensors[0][1].dtype
        if len(set(floats)) == 1:
            return torch.float32  # no kernel for this dtype: there is one for float32
        if self.compute in floats:
            return self.compute
        return max(floats, key=width, default=self.compute)

    def _run_converted(self, func: Any, args: Any, kwargs: Any, target: torch.dtype) -> Any:
        def convert(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                wrong = value.dtype in FLOATS and value.dtype != target
                return aten._to_copy.default(value, dtype=target) if wrong else value
            if isinstance(value, (list, tuple)):
                return type(value)(map(convert, value))
            return value

        if schema_of(func).mutates and isinstance(args[0], torch.Tensor) and args[0].dtype != target:
            return args[0]
        if schema_of(func).mutates and args and isinstance(args[0], (list, tuple)):
            return None  # a list of tensors written in place: nothing flows on from it but what was there
        return func(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})

    # ---------------------------------------------------------------------------------------- above the operators

    def composite(self, func: Any, args: Any, kwargs: Any, error: Exception) -> torch.dtype | None:
        """A function refused its operands before any operator ran; returns the dtype to go on with, or None."""
        tensors = given_tensors(args, kwargs)
        floats = {tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS}
        # Autocast refuses a 16-bit dtype other than its own where it promotes (at::autocast::prioritize).
        cast = torch.get_autocast_dtype("cpu") if "autocast" in str(error) else None
        if len(floats) + (cast is not None) < 2 or not says_dtypes(error):
            return None
        target = cast or (self.compute if self.compute in floats else max(floats, key=width))
        self.note(
            f"torch.{getattr(func, '__name__', func)}", tensors, Breach(first_line(error), False, target)
        )
        return target

    def banned(self, name: str, args: Any, kwargs: Any) -> None:
        """A function that autocast refuses to run."""
        breach = Breach(f"torch.nn.functional.{name} is unsafe to autocast", False, torch.float32)
        self.note(f"torch.{name}", given_tensors(args, kwargs), breach)

    def array(self, tensor: torch.Tensor) -> Any:
        """What stands for `tensor.numpy()`: zeros; NumPy has no bfloat16, which is a breach."""
        dtype = tensor.dtype
        if dtype == torch.bfloat16:
            dtype = torch.float32
            breach = Breach("Got unsupported ScalarType BFloat16", False, dtype)
            self.note("torch.Tensor.numpy", [("self", tensor)], breach)
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
        raised = raising_frame(error)
        source = f"{raised.f_code.co_filename}:{raised.f_lineno}" if raised is not None else ""
        text = f"{type(error).__name__}: {first_line(error)}"
        with torch._C.DisableTorchFunction():
            operands = () if raised is None else tuple(self._at_hand(raised.f_locals))
        mixed = len({operand.dtype for operand in operands}) > 1
        again = self.phase == "backward" and frame is not None
        return Failure(self.phase, frame.name if frame else "", source, text, mixed, operands, again)

    def _at_hand(self, variables: Mapping[str, Any]) -> Iterator[Operand]:
        for name, value in variables.items():
            if isinstance(value, torch.Tensor) and value.dtype in FLOATS:
                yield Operand(name, value.dtype, tuple(value.shape), self.origin(value))


# ------------------------------------------------------------------------------------------------------- helpers


def _overflow(name: str, args: Any) -> Breach | None:
    """The breach of filling a tensor with a number that its dtype does not hold."""
    if name not in _FILLS or isinstance(args[2], torch.Tensor) or args[0].dtype not in FLOATS:
        return None
    value = float(args[2])
    if not math.isfinite(value) or abs(value) <= torch.finfo(args[0].dtype).max:
        return None
    spelled = {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.float32: "float"}
    said = f"value cannot be converted to type {spelled.get(args[0].dtype, args[0].dtype)} without overflow"
    return Breach(said, False, None)


def _is_real(leaf: Any) -> bool:
    """Whether it is a tensor with values, not a fake nor what vmap makes of one."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(leaf)


def _as_measured(result: Any, dtypes: Sequence[torch.dtype]) -> Any:
    made = list(leaves(result))
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
