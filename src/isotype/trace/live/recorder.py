"""The recorder on real tensors, which does not change the step.

Its own memory is counted apart from the step's. If its bookkeeping fails, it stops and reports that
(`LiveRecorder.fault`); the step goes on.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from isotype.compat.torch import OpOverload, current_node, forget_gradient_hooks
from isotype.contracts.contract import contracts_here
from isotype.core.dtypes import autocast_dtype
from isotype.core.errors import first_line
from isotype.core.operators import given_tensors, tensors_in
from isotype.records.memory import Phase
from isotype.records.trace import FLOATS, Breach, Call, Origin, Weight
from isotype.trace.recorder import ORIGIN, Recorder
from isotype.trace.taken import DTYPE
from isotype.trace.weights import memory_kind, state_tensors, tensors_of, weights_of

aten = torch.ops.aten

_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
# Their names would hide the function that made a cast.
_BACKWARDS = frozenset({"backward", "grad"})


class LiveRecorder(Recorder):
    """Records a real step; operators run unchanged.

    Args:
        device: device type of the step.
        limit: maximum number of recorded calls.
        seconds: time limit of the bookkeeping.

    Attributes:
        contracts: of the device, for the diagnosis.
        autocast_device: device type of the step's autocast.
        fault: why the bookkeeping has stopped; "" while it works.
        failed: the last call of this step that raised; the script may have caught it.
        failure_text: its error.
        weights: parameters and buffers of every known model.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str, limit: float = math.inf, seconds: float = math.inf) -> None:
        super().__init__()
        self._limit, self._seconds, self._spent = limit, seconds, 0.0
        self.contracts = contracts_here(device)
        self.autocast_device = device
        self.fault = ""
        self.failed: Call | None = None
        self.failure_text = ""
        self.weights: list[Weight] = []
        self._marked: list[TensorWeakRef] = []
        self._process = os.getpid()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A higher-order operator is recorded by its inner operators; a forked process (a data loader's) is
        # another script.
        blind = self.fault or len(self.calls) >= self._limit
        if blind or not isinstance(func, OpOverload) or os.getpid() != self._process:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._book(self._raised, func, args, kwargs, error)
            raise
        self._book(self._done, func, args, kwargs, result)
        return result

    def _book(self, note: Callable[..., None], *args: Any) -> None:
        started = time.perf_counter()
        try:
            note(*args)
        except Exception as error:  # noqa: BLE001 - an error of the bookkeeping must not affect the script's step
            self.fault = f"{type(error).__name__}: {first_line(error)}"
        self._spent += time.perf_counter() - started
        if self._spent > self._seconds and not self.fault:
            self.fault = f"after {len(self.calls):,} operators it had taken {self._seconds:g} s"

    def _done(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._turn(func)
        self._write(func, args, kwargs, tensors_in(func, args, kwargs), result, self._place(), None)

    def _raised(self, func: Any, args: Any, kwargs: Any, error: Exception) -> None:
        self._turn(func)
        breach = Breach(first_line(error), False, None)
        self._write(func, (), {}, tensors_in(func, args, kwargs), None, self._place(), breach)
        self.failed, self.failure_text = self.calls[-1], str(error)

    def refused(self, func: Any, args: Any, kwargs: Any, error: Exception) -> None:
        """Record a function that refused its operands before any operator, for the diagnosis."""
        if self.fault or self.failure_text == str(error):
            return
        self._book(self._refused, func, args, kwargs, error)

    def _refused(self, func: Any, args: Any, kwargs: Any, error: Exception) -> None:
        tensors = given_tensors(args, kwargs)
        if len({tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS}) < 2:
            return
        self.note(f"torch.{getattr(func, '__name__', func)}", tensors, Breach(first_line(error), False, None))
        self.failed, self.failure_text = self.calls[-1], str(error)

    def begin_step(self) -> None:
        """Start another step, without the last one's calls and errors."""
        self.calls.clear()
        self.failed, self.failure_text = None, ""
        self.turn_to("forward")

    def reads_dtype(self, tensor: torch.Tensor) -> None:
        """Record a read of `tensor.dtype`."""
        if not self.fault:
            self._book(lambda: self.reads.note(self.origin(tensor)))

    def cast_origin(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin | None:
        """Return the origin as any recorder; a failure stops the bookkeeping."""
        if self.fault:
            return None
        origins: list[Origin | None] = []
        self._book(lambda: origins.append(super(LiveRecorder, self).cast_origin(name, args, kwargs)))
        return origins[0] if origins else None

    # -------------------------------------------------------------------------------------------------- phases

    @property
    def inside(self) -> bool:
        """True if a module's forward is running."""
        return bool(self._frames)

    def turn_to(self, phase: Phase) -> None:
        """Start `phase`."""
        self.phase = phase
        self.ledger.kind = "optimizer" if phase == "optimizer" else "activations"
        self.ledger.begin(phase)

    def _turn(self, func: Any) -> None:
        """Change the phase: autograd shows when the backward begins; a module's forward outside of it ends it."""
        if self.phase in ("optimizer", "generate"):
            return
        if current_node() is not None:
            now: Phase = "backward"
        elif func is _UNSCALE:
            now = "unscale"
        else:
            now = "forward" if self._frames else self.phase
        if now != self.phase:
            self.turn_to(now)

    # ------------------------------------------------------------------------------------------------- tensors

    def mark(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Set the origin of `tensor`'s dtype until `forget`."""
        if not hasattr(tensor, ORIGIN):
            self._marked.append(TensorWeakRef(tensor))  # type: ignore[no-untyped-call]
        super().mark(tensor, origin)

    def forget(self) -> None:
        """Remove all marks from the script's tensors and release them: a saved tensor keeps its attributes."""
        for reference in self._marked:
            tensor = reference()
            if tensor is not None and hasattr(tensor, ORIGIN):
                delattr(tensor, ORIGIN)
        self._marked.clear()
        self.names.clear()
        self._alive.clear()
        self._places.clear()

    def weigh(self, model: nn.Module, prefix: str = "") -> list[Any]:
        """Count weights, adapters, buffers and quantization states that are not known yet.

        Returns the handles of the hooks that distinguish gradients from activations.
        """
        handles = []
        layers = dict(model.named_modules())
        for tensor, weight in zip(tensors_of(model), weights_of(model), strict=True):
            if id(tensor) in self.names:
                continue
            layer = layers[weight.module]
            if prefix:
                weight = replace(
                    weight, name=f"{prefix}{weight.name}", module=f"{prefix}{weight.module}".rstrip(".")
                )
            self.weights.append(weight)
            self._own(tensor, Origin("buffer" if weight.buffer else "parameter", tensor.dtype, weight.name))
            self.ledger.seen(tensor, memory_kind(weight))
            for state in state_tensors(tensor, layer):
                self.ledger.seen(state, "weights")
                self.mark(state, Origin("state", state.dtype, weight.module, weight.module))
            if tensor.requires_grad and tensor.is_leaf:
                handles.append(_GradientHook(tensor, self._gradient))
        self._own_plain_tensors(model, prefix)
        return handles

    def mark_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Register the tensors that a model is called with, by name, unless the step made them."""
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and not hasattr(value, ORIGIN):
                self.mark(value, Origin("input", value.dtype, name))
                self.ledger.seen(value, "inputs")

    def _gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._book(self.ledger.seen, parameter.grad, "gradients")


class _GradientHook:
    """A hook on a leaf's gradient; its removal leaves no cost in later backwards."""

    def __init__(self, leaf: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        self._leaf = leaf
        self._handle = leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        self._handle.remove()
        forget_gradient_hooks(self._leaf)


class LiveFunctions(TorchFunctionMode):
    """Passes the running function, and errors above the operators, to the recorder."""

    def __init__(self, recorder: LiveRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if getattr(func, "__self__", None) is DTYPE:
            recorder.reads_dtype(args[0])
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        before = recorder.function, recorder.autocast, recorder.like
        device = recorder.autocast_device
        cast = autocast_dtype(device)
        recorder.like = recorder.cast_origin(name, args, kwargs)
        recorder.function, recorder.autocast = "" if name in _BACKWARDS else name, cast
        try:
            return func(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError) as error:
            recorder.refused(func, args, kwargs, error)
            raise
        finally:
            recorder.function, recorder.autocast, recorder.like = before


# --------------------------------------------------------------------------------------------------- measurement


def device_of(model: nn.Module) -> str:
    """Return the device type of most of a model's parameters; `"cpu"` for a model without any."""
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        counts[parameter.device.type] = counts.get(parameter.device.type, 0) + parameter.numel()
    return max(counts, key=lambda device: counts[device], default="cpu")
