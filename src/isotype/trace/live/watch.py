"""Watching the first steps of an unchanged script: hooks that detect the start and end of a step, and remove
themselves.

The hooks are torch's global ones for modules and optimizers. They wait for the first training forward, pass
it to `before` (which may trace ahead), and put the live recorder under the script's modes. A few forwards of
evaluation or generation before it are recorded too. After the requested number of optimizer steps, hooks,
modes and references to the script's tensors are removed, and modules are as fast as before.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from isotype.compat.standard import frame_above
from isotype.compat.torch import (
    has_compiler,
    is_compiled,
    is_simulated,
    is_traced,
    original,
    put_under,
    take_out,
)
from isotype.core.optimizers import learning_rate_of
from isotype.records.memory import Memory, Phase
from isotype.records.reach import Unreached
from isotype.records.trace import Failure, Setup, Trace
from isotype.trace.live.forward import (
    enumerate_inputs,
    has_parameters,
    in_backward,
    kwargs_of,
    named_inputs,
    trains,
)
from isotype.trace.live.recorder import LiveFunctions, LiveRecorder, device_of

State = Literal["waiting", "evaluating", "looking", "watching", "paused", "over"]

WATCH_SECONDS = 10.0
"""Time limit of a watch's bookkeeping: enough for 100,000 operators."""

_BLIND_STEPS = 3
_EVALUATIONS, _EVALUATIONS_IN_ALL = 3, 12
"""Recorded forwards per model, and of all, before the first training step: crashes are early."""

_EVALUATION_CALLS = 20_000
"""Maximum recorded operators of these; a script may run for hours before it trains."""

_COMPILED_WARNING = "Using `torch.compile"


@dataclass(frozen=True)
class Beginning:
    """The first forward of a training step, about to run.

    Attributes:
        model: the called module.
        inputs: its inputs by argument name; None if a name is unknown.
        args, kwargs: the original arguments.
    """

    model: nn.Module
    inputs: Mapping[str, Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class StepSeen:
    """A watched step: its number of operators and memory peaks."""

    operators: int
    memory: Memory


class Watch:
    """Watches the first `steps` training steps of this process, in the thread that begins one.

    Args:
        steps: number of optimizer steps, at least 1.
        before: called with the first forward before it runs; the script waits.
        after: called at the end of a step, with its calls still available.
        evaluates: called with each recorded forward without training, before it runs.

    Attributes:
        state: current state.
        seen: the watched steps.
        notes: what was not watched, and why.
        recorder: of the current or last watched step.
        optimizer: name of the optimizer's class; "" before its first step.
        learning_rate: of its first group of parameters.
        scaler: whether gradients were unscaled by a GradScaler.
        reached: number of the optimizer's parameters with a gradient; None before its first step.
        unreached: those without one that the forward used.
    """

    def __init__(
        self,
        steps: int = 1,
        before: Callable[[Beginning], None] = lambda beginning: None,
        after: Callable[[], None] = lambda: None,
        evaluates: Callable[[Beginning], None] = lambda beginning: None,
    ) -> None:
        self.state: State = "waiting"
        self.seen: list[StepSeen] = []
        self.notes: list[str] = []
        self.recorder: LiveRecorder | None = None
        self.optimizer, self.scaler = "", False
        self.learning_rate: float | None = None
        self.reached: int | None = None
        self.unreached: tuple[Unreached, ...] = ()
        self._steps, self._before, self._after, self._evaluates = steps, before, after, evaluates
        self._mine: tuple[int, int] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: list[nn.Module] = []
        self._modes: tuple[Any, ...] = ()
        self._handles: list[Any] = []
        self._weights_handles: list[Any] = []
        self._module_handles: list[Any] = []
        self._stance: Any = None
        self._blind = 0
        # Number of recorded evaluations per module, and in all.
        self._evaluations: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._evaluated = 0

    @property
    def model(self) -> nn.Module | None:
        """The module of the first recorded forward of the step, while it is alive."""
        return self._model() if self._model is not None else None

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The outermost modules called in the watched steps."""
        return tuple(self._roots)

    # ------------------------------------------------------------------------------------------- coming and going

    def attach(self) -> None:
        """Start waiting for a step."""
        # compile warns about global hooks; these are removed before it matters.
        self._handles += [
            _filtered(_COMPILED_WARNING),
            optimizers.register_optimizer_step_pre_hook(self._step_begins),
            optimizers.register_optimizer_step_post_hook(self._step_ends),
        ]
        self._hook_modules()

    def detach(self) -> None:
        """Remove all hooks and modes; recorded data stays until `forget`."""
        self.state = "over"
        self._leave_modes()
        self._unhook_modules()
        while self._handles:
            self._handles.pop().remove()
        self._unhook_weights()
        self._leave_stance()
        if self.recorder is not None and self.recorder.fault:
            self._note(f"watching stopped early: {self.recorder.fault}")
            self.recorder.fault = ""

    def forget(self) -> None:
        """Release every tensor, module and call of the script."""
        if self.recorder is not None:
            self.recorder.forget()
        self.recorder = None
        self._roots.clear()
        self._names.clear()

    def _hook_modules(self) -> None:
        def before(module: nn.Module, args: Any) -> None:
            # A compiler that traces the call must not trace this.
            if not torch.compiler.is_compiling():
                self._guard(self._enters, module, args, frame_above(1))

        def after(module: nn.Module, args: Any, result: Any) -> None:
            if not torch.compiler.is_compiling():
                self._guard(self._leaves)

        self._module_handles = [
            modules.register_module_forward_pre_hook(before),
            modules.register_module_forward_hook(after, always_call=True),
        ]

    def _unhook_modules(self) -> None:
        while self._module_handles:
            self._module_handles.pop().remove()

    def _leave_stance(self) -> None:
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _unhook_weights(self) -> None:
        while self._weights_handles:
            self._weights_handles.pop().remove()

    def _enter_modes(self) -> None:
        assert self.recorder is not None
        self._modes = (self.recorder, LiveFunctions(self.recorder))
        put_under(*self._modes)

    def _leave_modes(self) -> None:
        take_out(*self._modes)
        self._modes = ()

    def _guard(self, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Exception as error:  # noqa: BLE001 - an error of the watch must not affect the script
            self._note(f"watching stopped early: {type(error).__name__}: {error}")
            self.detach()

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # ----------------------------------------------------------------------------------------------------- modules

    def _enters(self, module: nn.Module, args: Any, frame: Any) -> None:
        if self.state not in ("waiting", "evaluating", "watching") or not self._is_mine():
            return
        inside = self.recorder is not None and self.recorder.inside
        if self.state != "watching" and not inside:
            if trains(module):
                self._end_evaluation()
                self._begin(module, args, kwargs_of(frame))
            elif self._may_evaluate(module):
                self._evaluate(module, args, kwargs_of(frame))
            else:
                self._end_evaluation()
                return
        recorder = self.recorder
        assert recorder is not None
        if not inside:
            if recorder.phase == "backward" and not in_backward():
                self._pause()
                return
            self._know(module, args, kwargs_of(frame))
        recorder.enter(self._names.get(module, type(module).__name__))

    def _leaves(self) -> None:
        recorder = self.recorder
        if (
            self.state in ("watching", "evaluating")
            and recorder is not None
            and recorder.inside
            and self._is_mine()
        ):
            recorder.leave()

    def _is_mine(self) -> bool:
        """Return whether this is a real call of the watched thread, or of autograd's threads recomputing for
        it.

        A process forked during a watched step (a data loader's worker) is not watched.
        """
        process, thread = self._mine or (os.getpid(), threading.get_ident())
        mine = process == os.getpid() and (thread == threading.get_ident() or in_backward())
        return mine and not is_simulated() and not is_traced()

    def _begin(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        inner = original(module)
        if any(map(is_compiled, (module, *module.modules()))):
            self._note("torch.compile is off in the watched steps: compiled code has no operators to watch")
        self.state, self._mine = "looking", (os.getpid(), threading.get_ident())
        self._model = weakref.ref(inner)
        self._before(Beginning(inner, named_inputs(inner, args, kwargs), args, kwargs))
        self._record(LiveRecorder(device_of(module), seconds=WATCH_SECONDS), "forward")
        self.state = "watching"

    def _record(self, recorder: LiveRecorder, phase: Phase) -> None:
        self.recorder = recorder
        if has_compiler():
            self._stance = torch.compiler.set_stance("force_eager")
        recorder.turn_to(phase)
        self._enter_modes()

    def _may_evaluate(self, module: nn.Module) -> bool:
        """Return whether to record a forward without training: one of the first, of an eager model."""
        if self._evaluations.get(module) == _EVALUATIONS or self._evaluated == _EVALUATIONS_IN_ALL:
            return False
        if self.recorder is not None and len(self.recorder.calls) >= _EVALUATION_CALLS:
            return False
        return not is_compiled(module) and has_parameters(module)

    def _evaluate(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._evaluations[module] = self._evaluations.get(module, 0) + 1
        self._evaluated += 1
        self._model, self._mine = weakref.ref(module), (os.getpid(), threading.get_ident())
        beginning = Beginning(module, named_inputs(module, args, kwargs), args, kwargs)
        if self.state == "evaluating":
            self._without_modes(lambda: self._evaluates(beginning))
        else:
            self._evaluates(beginning)
            self._record(LiveRecorder(device_of(module), _EVALUATION_CALLS), "generate")
            self.state = "evaluating"

    def _end_evaluation(self) -> None:
        """Discard the recorded evaluation before the next forward or training step."""
        if self.state != "evaluating":
            return
        self._leave_modes()
        self._unhook_weights()
        self._leave_stance()
        self.forget()
        self.state, self._mine = "waiting", None

    def _know(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Register names and weights of an outermost module."""
        assert self.recorder is not None
        inner = original(module)
        prefix = ""
        if inner not in self._names:
            inside = {id(part) for part in inner.modules()}
            if self._roots and not any(id(root) in inside for root in self._roots):
                prefix = f"{type(inner).__name__}."
            self._names.update({part: f"{prefix}{name}".rstrip(".") for name, part in inner.named_modules()})
            self._roots.append(inner)
            self._without_modes(lambda: self._weights_handles.extend(self._weighed(inner, prefix)))
        self._names.setdefault(module, "")
        inputs = named_inputs(inner, args, kwargs) or dict(enumerate_inputs(args, kwargs))
        self.recorder.mark_inputs(inputs)

    def _weighed(self, module: nn.Module, prefix: str) -> list[Any]:
        assert self.recorder is not None
        return self.recorder.weigh(module, prefix)

    def _without_modes(self, act: Callable[[], None]) -> None:
        """Run code outside of the script's recorded operators."""
        modes = self._modes
        take_out(*modes)
        try:
            act()
        finally:
            put_under(*modes)

    # ------------------------------------------------------------------------------------------------------- steps

    def _pause(self) -> None:
        """Pause after a backward followed by another forward: gradients accumulate, the rest is a repetition."""
        self.state = "paused"
        self._note("gradients accumulate: of several forwards and backwards a step the first was watched")
        self._leave_modes()
        self._unhook_modules()

    def _step_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._guard(self._optimizer_begins, optimizer)

    def _step_ends(self, *_: Any) -> None:
        self._guard(self._optimizer_ends)

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if torch.compiler.is_compiling() or not self._is_mine():
            return
        self._end_evaluation()
        if self.state == "waiting":
            self._blind += 1
            if self._blind == _BLIND_STEPS:
                self._note("the optimizer steps, but no module's forward was seen: nothing was watched")
                self.detach()
            return
        if self.state == "paused":
            self.state = "watching"
            self._enter_modes()
        if self.state == "watching" and self.recorder is not None:
            self.optimizer = type(optimizer).__name__
            self.learning_rate = learning_rate_of(optimizer)
            self._weigh_gradients(optimizer)
            self.recorder.turn_to("optimizer")

    def _weigh_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the optimizer's parameters that the forward used and that have no gradient."""
        assert self.recorder is not None
        used = {
            operand.origin.name: call.module
            for call in self.recorder.calls
            if call.phase == "forward"
            for operand in call.operands
            if operand.origin.kind == "parameter"
        }
        held = [
            weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad
        ]
        self.reached = sum(weight.grad is not None for weight in held)
        named = [self.recorder.names.get(id(weight)) for weight in held if weight.grad is None]
        self.unreached = tuple(
            Unreached(origin.name, used[origin.name], "", "", (), ignored=True)
            for origin in named
            if origin is not None and origin.name in used
        )

    def _optimizer_ends(self) -> None:
        recorder = self.recorder
        if (
            self.state != "watching"
            or recorder is None
            or recorder.phase != "optimizer"
            or not self._is_mine()
        ):
            return
        if recorder.fault:
            self.detach()  # this step was only seen in part
            self.forget()
            return
        self.scaler = self.scaler or any(call.phase == "unscale" for call in recorder.calls)
        self.seen.append(StepSeen(len(recorder.calls), recorder.ledger.record()))
        self._leave_modes()
        self._after()
        if len(self.seen) == self._steps:
            self.detach()
            self.forget()
            return
        recorder.begin_step()
        self._enter_modes()
        if not self._module_handles:
            self._hook_modules()

    # ------------------------------------------------------------------------------------------------------- trace

    def trace(self, setup: Setup, failure: Failure | None = None) -> Trace:
        """Return the trace of the current or last recorded step; without a failure it has no breaches."""
        assert self.recorder is not None
        recorder = self.recorder
        calls = recorder.calls
        if failure is None:
            # Errors caught by the script did not end the step.
            calls = [replace(call, breach=None) for call in calls]
        return Trace(
            setup=setup,
            calls=tuple(calls),
            weights=tuple(recorder.weights),
            modules={
                self._names[part]: type(part).__name__
                for root in self._roots
                for part in root.modules()
                if part in self._names
            },
            memory=recorder.ledger.record(),
            failure=failure,
            notes=tuple(self.notes),
            model=type(self._roots[0]).__name__ if self._roots else "",
            input_dtypes=frozenset(recorder.inputs),
            reached=self.reached,
            unreached=self.unreached,
        )

    def autocast(self) -> torch.dtype | None:
        """Return the autocast dtype of most operators of the forward."""
        assert self.recorder is not None
        forward = ("forward", "generate")
        counts = Counter(call.autocast for call in self.recorder.calls if call.phase in forward)
        return counts.most_common(1)[0][0] if counts else None


# --------------------------------------------------------------------------------------------------------- helpers


class _Filter:
    """A warning filter that is active until `remove`."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def remove(self) -> None:
        if self._entry in warnings.filters:
            warnings.filters.remove(self._entry)  # type: ignore[attr-defined]


def _filtered(message: str) -> _Filter:
    warnings.filterwarnings("ignore", message=message)
    return _Filter(warnings.filters[0])
