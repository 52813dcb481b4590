"""Records the first steps of an unchanged script: global hooks start and end the recording, then remove themselves.

The hooks are torch's global hooks for modules and optimizers. The first training forward calls `before` and starts the
live recorder. The recorder is below the script's dispatch modes, so it records the operators that these modes call.
After the requested number of steps, hooks, modes and references to the script's tensors are removed.
"""

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from isotype.compat.compiler import uncompiled
from isotype.compat.replaced import Replacements
from isotype.compat.standard import frame_above
from isotype.compat.torch import (
    around_backward,
    has_compiler,
    in_backward,
    is_compiled,
    is_simulated,
    is_traced,
    is_transformed,
    no_modes,
    original,
    put_under,
    take_out,
)
from isotype.core.operators import tensors_of
from isotype.core.optimizers import class_of, learning_rate_of, parameters_of
from isotype.model.adapters import unmatched
from isotype.model.recompute import idle_checkpoints
from isotype.records.memory import Phase
from isotype.records.request import Setup
from isotype.records.trace import Call, Failure, Origin, Trace
from isotype.trace.live.forward import Beginning, autocast_of, beginning_of, is_lazy, named_inputs, trains
from isotype.trace.live.gradients import (
    LastStep,
    Sample,
    StepSeen,
    after_step,
    gradients_of,
    not_finite_in,
    optimizers_here,
    samples_of,
)
from isotype.trace.live.recorder import LiveFunctions, LiveRecorder, device_of, in_dtypes, warnings_at_callers
from isotype.trace.script import dtype_reasons, misspelt_arguments

State = Literal["waiting", "evaluating", "looking", "watching", "paused", "over"]

WATCH_SECONDS = 10.0
"""Time limit of the recorder's own work in seconds: enough for 100,000 operators."""

MANY_SKIPPED = 20
"""The recording ends after this number of skipped steps, which lower the loss scale from 65536 to below 1."""

_BLIND_STEPS = 3
_EVALUATIONS, _EVALUATIONS_IN_ALL = 3, 12
"""Maximum numbers of forwards that are recorded before the first training step: of one model, and of all models."""

_EVALUATION_CALLS = 20_000
"""Maximum number of operators that are recorded before the first training step."""

_OPTIMIZERS = 3
"""With several optimizers, as for a GAN, one step of each is recorded, but at most this number."""


class Watch:
    """Records the first `steps` training steps of this process. Only the thread that begins a step is recorded.

    Args:
        steps: number of optimizer steps, at least 1.
        before: called once, before the first training forward. May return the outermost module of the step.
        after: called at the end of each step, even if the GradScaler skips the step. The step's record is still
            complete.
        evaluates: called before each recorded forward of an evaluation or generation.
        repeats: called with the lines of two optimizer steps if both use the same gradients.

    Attributes:
        notes: sentences on what was not recorded, and why.
        recorder: recorder of the current or last step; None before the first step and after `forget`.
        roots: the outermost modules that the recorded steps have called; empty after `forget`.
        optimizer: name of the optimizer's class; "" before its first step.
        learning_rate: learning rate of the optimizer's first group of parameters.
        scaler: True if the loss of the last step was scaled.
        gradients: the result of `gradients_of` at the start of the last optimizer step; empty before it.
        not_finite: name of a parameter whose gradient was NaN or infinite in the last optimizer step; "" without one.
        skipped: number of steps that the GradScaler has skipped.
        skipping: True while `after` is called for a skipped step.
        device_autocast: autocast dtype of the recorded step -> autocast dtype of the simulated device.
        evaluation: calls that were recorded before the first training forward, for example of a reference model.
        transformed: True if a transform of `torch.func` has called a module. These calls are not recorded.
    """

    def __init__(
        self,
        steps: int = 1,
        before: Callable[[Beginning], nn.Module | None] = lambda beginning: None,
        after: Callable[[], None] = lambda: None,
        evaluates: Callable[[Beginning], None] = lambda beginning: None,
        repeats: Callable[[tuple[str, str]], None] = lambda lines: None,
    ) -> None:
        self.state: State = "waiting"
        self.seen: list[StepSeen] = []
        self.notes: list[str] = []
        self.recorder: LiveRecorder | None = None
        self.roots: tuple[nn.Module, ...] = ()
        self.optimizer, self.scaler = "", False
        self.learning_rate: float | None = None
        self._autocast: torch.dtype | None = None
        self.gradients, self._samples = dict[str, Any](), list[Sample]()
        self.skipped, self.skipping, self._stepping, self.not_finite = 0, False, False, ""
        self.transformed, self.evaluation = False, tuple[Call, ...]()
        self.kind, self.device_autocast = "cpu", dict[torch.dtype, torch.dtype]()
        self._steps, self._before, self._after, self._evaluates = steps, before, after, evaluates
        self._repeats, self._last = repeats, LastStep()
        self._mine: tuple[int, int] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._modes: tuple[Any, ...] = ()
        self._hooks, self._module_hooks, self._recording = ExitStack(), ExitStack(), ExitStack()
        self._blind = self._held = 0
        self._other_optimizers = weakref.WeakSet[torch.optim.Optimizer]()  # from before `attach`
        # Number of recorded evaluations per module, and in all.
        self._evaluations, self._evaluated = weakref.WeakKeyDictionary[nn.Module, int](), 0

    @property
    def model(self) -> nn.Module | None:
        """The module whose forward was recorded first in the step; None if the script has freed it."""
        return self._model() if self._model is not None else None

    @property
    def _live(self) -> LiveRecorder:
        assert self.recorder is not None
        return self.recorder

    # ------------------------------------------------------------------------------------------- coming and going

    def attach(self) -> None:
        """Add the global hooks, which start the recording at the next step."""
        self._other_optimizers = weakref.WeakSet(optimizers_here())
        # torch.compile warns about global hooks. They are removed before they can slow compiled code down.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        module: Any = warnings  # its list of filters changes
        self._hooks.callback(lambda e: e in module.filters and module.filters.remove(e), module.filters[0])
        self._hooks.enter_context(warnings_at_callers())
        begins, ends = (
            partial(self._around_step, act) for act in (self._optimizer_begins, self._optimizer_ends)
        )
        self._hooks.enter_context(optimizers.register_optimizer_step_pre_hook(begins))
        self._hooks.enter_context(optimizers.register_optimizer_step_post_hook(ends))
        self._hook_modules()

    def detach(self) -> None:
        """Remove all hooks and modes; recorded data stays until `forget`."""
        self.state = "over"
        self._leave_modes()
        self._module_hooks.close()
        self._recording.close()
        if self._stepping:
            # torch is still iterating over its hooks, and the optimizer may step again. So the next forward removes
            # these hooks.
            handle = modules.register_module_forward_pre_hook(lambda *_: self._hooks.close())
            self._hooks.callback(handle.remove)
        else:
            self._hooks.close()
        if self.recorder is not None and self.recorder.fault:
            self._note(f"the recording stopped early: {self.recorder.fault}")
            self.recorder.fault = ""

    def forget(self) -> None:
        """Release every tensor, module and call of the script."""
        if self.recorder is not None:
            self.recorder.forget()
        self.recorder, self.roots = None, ()
        self._names.clear()

    def _hook_modules(self) -> None:
        def before(module: nn.Module, args: Any) -> None:
            # A compiler that traces the call of the module must not trace this hook.
            if not torch.compiler.is_compiling():
                self._guard(self._enters, module, args, frame_above(1))

        def after(module: nn.Module, args: Any, result: Any) -> None:
            if not torch.compiler.is_compiling():
                self._guard(self._leaves)

        self._module_hooks.close()
        self._module_hooks.enter_context(modules.register_module_forward_pre_hook(before))
        self._module_hooks.enter_context(modules.register_module_forward_hook(after, always_call=True))

    def _enter_modes(self) -> None:
        self._modes = (self._live, LiveFunctions(self._live))
        put_under(*self._modes)

    def _leave_modes(self) -> None:
        take_out(*self._modes)
        self._modes = ()

    def _around_step(self, act: Callable[..., Any], *args: Any) -> Any:
        self._stepping = True
        result = self._guard(act, *args)
        self._stepping = False
        return result

    def _guard(self, act: Callable[..., Any], *args: Any) -> Any:
        try:
            return act(*args)
        except Exception as error:  # noqa: BLE001 - an error of the watch must not affect the script
            self._note(f"the recording stopped early: {type(error).__name__}: {error}")
            self.detach()

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # ----------------------------------------------------------------------------------------------------- modules

    def _enters(self, module: nn.Module, args: Any, frame: Any) -> None:
        if self.state not in ("waiting", "evaluating", "watching"):
            return
        if not self._is_mine():
            if self.recorder is not None and self.recorder.in_other_thread(module, self._names.get(module)):
                self._note("the operators that the model ran in other threads were not recorded")
            return
        if is_transformed():
            self.transformed = True
            return
        if self.recorder is None or not self.recorder.inside:
            kwargs = frame.f_locals.get("kwargs", {})  # a global hook does not get the keyword arguments
            if self.state != "watching" and trains(module):
                if self.state == "evaluating" and self.recorder is not None:
                    self.evaluation = tuple(self.recorder.calls)
                self._end_evaluation()
                self._begin(module, args, kwargs, frame)
            elif self.state != "watching" and self._may_evaluate(module):
                self._evaluate(module, args, kwargs)
            elif self.state != "watching":
                self._end_evaluation()
                return
            self._last = LastStep()
            if self._live.phase == "unscale":
                self._skip()
            # `torch.autograd.grad` leaves no gradients that could accumulate.
            if self._live.phase == "backward" and self._live.graded and not in_backward():
                self._pause()
                return
            self._register(module, args, kwargs)
        self._live.enter(self._names.get(module, type(module).__name__), module=module)

    def _leaves(self) -> None:
        records = self.state in ("watching", "evaluating")
        if self.recorder is not None and self.recorder.inside and records and self._is_mine():
            self.recorder.leave()

    def _is_mine(self) -> bool:
        """Return whether the call runs in the recorded thread or a backward, with real tensors, and not in a forked process."""
        process, thread = self._mine or (os.getpid(), threading.get_ident())
        mine = process == os.getpid() and (thread == threading.get_ident() or in_backward())
        return mine and not is_simulated() and not is_traced()

    def _begin(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], frame: FrameType) -> None:
        if any(map(is_compiled, (module, *module.modules()))):
            self._note("torch.compile is off in the recorded steps: compiled code has no operators to record")
        self.state = "looking"
        outermost = self._before(self._beginning(original(module), args, kwargs, frame))
        self._record(LiveRecorder(device_of(module), seconds=WATCH_SECONDS, kind=self.kind), "forward")
        if outermost is not None:
            self._model = weakref.ref(outermost)
            self._register(outermost, (), {})
        self.state = "watching"

    def _beginning(self, module: nn.Module, *call: Any) -> Beginning:
        self._model, self._mine = weakref.ref(module), (os.getpid(), threading.get_ident())
        return beginning_of(module, *call)

    def _record(self, recorder: LiveRecorder, phase: Phase) -> None:
        self.recorder = recorder
        if has_compiler():
            self._recording.enter_context(uncompiled())
        around_backward(self._recording.enter_context(Replacements()), recorder.around_backward)
        recorder.turn_to(phase)
        self._enter_modes()

    def _may_evaluate(self, module: nn.Module) -> bool:
        """Return whether to record a forward without training: only the first forwards of each uncompiled model."""
        full = self.recorder is not None and len(self.recorder.calls) >= _EVALUATION_CALLS
        if full or self._evaluations.get(module) == _EVALUATIONS or self._evaluated == _EVALUATIONS_IN_ALL:
            return False
        # Transforms and metrics are modules, too, but have no parameters.
        parameters = any(not parameter.is_meta for parameter in module.parameters())
        return parameters and not is_compiled(module) and not is_lazy(module)

    def _evaluate(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._evaluations[module] = self._evaluations.get(module, 0) + 1
        self._evaluated += 1
        beginning = self._beginning(module, args, kwargs)
        self._without_modes(lambda: self._evaluates(beginning))
        if self.state != "evaluating":
            self._record(LiveRecorder(device_of(module), _EVALUATION_CALLS), "generate")
            self.state = "evaluating"

    def _end_evaluation(self) -> None:
        """Discard the record of an evaluation, so that the next forward or step can be recorded."""
        if self.state != "evaluating":
            return
        self._leave_modes()
        self._recording.close()
        self.forget()
        self.state, self._mine = "waiting", None

    def _register(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        recorder, inner, prefix = self._live, original(module), ""
        if inner not in self._names:
            inside = {id(part) for part in inner.modules()}
            if self.roots and not any(id(root) in inside for root in self.roots):
                prefix = f"{type(inner).__name__}."
            self._names.update({part: f"{prefix}{name}".rstrip(".") for name, part in inner.named_modules()})
            self.roots += (inner,)
            if isinstance(inner, nn.parallel.DistributedDataParallel):
                self._recording.callback(inner.register_forward_hook(recorder.after_replica).remove)
            self._without_modes(lambda: self._recording.enter_context(recorder.weigh(inner, prefix)))
        self._names.setdefault(module, "")
        recorder.mark_inputs(named_inputs(inner, args, kwargs))

    def _without_modes(self, act: Callable[[], Any]) -> None:
        take_out(*self._modes)
        try:
            act()
        finally:
            put_under(*self._modes)

    # ------------------------------------------------------------------------------------------------------- steps

    def _pause(self) -> None:
        """Pause the recording while gradients accumulate, because later micro-batches only repeat the first micro-batch."""
        self.state = "paused"
        updated = (id(weight) for optimizer in optimizers_here() for weight in parameters_of(optimizer))
        updates = not self._live.names.keys().isdisjoint(updated)
        why = "gradients accumulate" if updates else "no optimizer of torch updates this model"
        self._note(f"{why}: only the first forward and backward of each step was recorded")
        self._live.of_gradients = True  # for clipping and unscaling, which follow the last micro-batch
        self._module_hooks.close()

    def _skip(self) -> None:
        """End a step that the GradScaler has skipped, and start the next step."""
        self.scaler, self.skipped, self.skipping = True, self.skipped + 1, True
        self._without_modes(self._after)
        self.skipping = False
        if self.skipped == MANY_SKIPPED:
            self.detach()
        self._live.begin_step()

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._is_mine():
            return None
        closure = next((value for value in (*args[1:], *kwargs.values()) if callable(value)), None)
        if closure is not None:
            new = {id(closure): partial(self._closed, closure, optimizer)}
            return tuple(new.get(id(v), v) for v in args), {n: new.get(id(v), v) for n, v in kwargs.items()}
        if lines := self._last.repeated_by(optimizer, self.scaler):
            self._repeats(lines)
        self._updates(optimizer)
        return None

    def _closed(self, closure: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
        """Call an optimizer's closure, which computes new gradients, and record the gradients before the update."""
        if self.recorder is not None and self.recorder.phase == "optimizer":
            self.recorder.turn_to("forward")
        result = closure()
        self._guard(self._updates, optimizer)
        return result

    def _updates(self, optimizer: torch.optim.Optimizer) -> None:
        self._end_evaluation()
        if self.state in ("paused", "watching") and self.recorder is not None:
            self.state = "watching"
            self.recorder.of_gradients = False
            self.weigh_gradients(optimizer)
            self._weigh_optimizer(optimizer)
            with no_modes():
                self._samples = samples_of(optimizer, self.recorder.names)
                self.not_finite = not_finite_in(optimizer, self.recorder.names)
            self.recorder.turn_to("optimizer")

    def weigh_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        recorder = self._live
        self.optimizer = class_of(optimizer)
        self.learning_rate = learning_rate_of(optimizer)
        self.gradients = gradients_of(optimizer, recorder, self.roots, self.scaler)
        scaled, idle = not self.gradients.pop("plain"), self.gradients.pop("idle")
        weights = recorder.weights
        weights[:] = [replace(w, trainable=w.trainable and w.name not in idle) for w in weights]
        unscales = any(call.phase == "unscale" for call in recorder.calls)
        self.scaler = unscales or (self.scaler and scaled)
        for weight in parameters_of(optimizer):
            if weight.grad is not None and (origin := recorder.names.get(id(weight))) is not None:
                recorder.mark_gradient(weight, origin.name)

    def _weigh_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the memory that the optimizer held before the step: its states, and its own copies of the weights."""
        recorder = self._live
        for weight in parameters_of(optimizer):
            if id(weight) not in recorder.names:
                recorder.ledger.count(weight, "optimizer")
            for key, state in optimizer.state.get(weight, {}).items():
                for tensor in tensors_of(state):
                    recorder.ledger.count(tensor, "optimizer")
                    recorder.mark(tensor, Origin("outside", tensor.dtype, f"the optimizer's {key}"))
        self._held = recorder.ledger.alive("optimizer")

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        recorder, watching = self.recorder, self.state == "watching"
        if self.state == "waiting" and not torch.compiler.is_compiling() and self._is_mine():
            self._blind += 1
            if self._blind == _BLIND_STEPS:
                frozen = not any(parameter.requires_grad for parameter in parameters_of(optimizer))
                why = "none of its parameters requires a gradient" if frozen else "no module ran a forward"
                self._note(f"the optimizer steps, but {why}: nothing was recorded")
                self.detach()
        if recorder is None or not watching or recorder.phase != "optimizer" or not self._is_mine():
            return
        if recorder.fault:
            self.detach()  # only a part of this step was recorded
            self.forget()
            return
        self.seen.append(StepSeen(len(recorder.calls), recorder.ledger.record(self._held)))
        self._leave_modes()
        self.gradients |= after_step(optimizer, self._samples)
        self._samples = []
        if len(self.seen) == 1:
            new = sum(1 for other in optimizers_here() if other not in self._other_optimizers)
            self._steps = max(self._steps, min(new, _OPTIMIZERS))
        if len(self.seen) == self._steps:
            self.detach()
        self._after()
        self._last = LastStep(optimizer)
        if self.state == "over":
            self.forget()
            return
        recorder.begin_step()
        self._enter_modes()
        self._hook_modules()

    # ------------------------------------------------------------------------------------------------------- trace

    def trace(self, setup: Setup, failure: Failure | None = None, no_autocast: str = "") -> Trace:
        """Return the trace of the last recorded step. Errors that the script has caught are left out."""
        recorder = self._live
        calls = recorder.calls
        if failure is None:
            # The script has caught every error. Only breaches of the simulated device, which have a conversion, remain.
            calls = [replace(c, breach=c.breach if c.breach and c.breach.converted else None) for c in calls]
        if self.device_autocast and not any(
            weight.dtype in self.device_autocast for weight in recorder.weights
        ):
            calls = [in_dtypes(call, self.device_autocast) for call in calls]
        parts = (part for root in self.roots for part in root.modules() if part in self._names)
        # The code after a failed step may have changed the mode. Newer layers recompute in eval mode, too.
        recomputes = failure is not None or any(call.recomputed for call in calls)
        idle = () if recomputes else (name for root in self.roots for name in idle_checkpoints(root))
        return Trace(
            setup=setup,
            calls=tuple(calls),
            weights=tuple(recorder.weights),
            modules={self._names[part]: type(part).__name__ for part in parts},
            memory=recorder.ledger.record(self._held),
            failure=failure,
            notes=tuple(self.notes),
            model=type(self.roots[0]).__name__ if self.roots else "",
            input_dtypes=dict(recorder.inputs),
            unmatched=tuple(name for root in self.roots for name in unmatched(root)),
            misspelt=misspelt_arguments(),
            reasons=dtype_reasons(next(iter(self.roots), nn.Module())),
            idle_checkpoints=tuple(idle),
            no_autocast=no_autocast,
            lost_terms=tuple(dict.fromkeys(recorder.terms.lost)),
            **self.gradients,
        )

    def autocast(self) -> torch.dtype | None:
        """Return the autocast dtype under which most operators of the last forward ran; None without autocast."""
        # The second of two optimizers may step after the backward of the first.
        backward = any(call.phase == "backward" for call in self._live.calls)
        if backward or self._live.phase != "optimizer":
            self._autocast = autocast_of(self._live.calls)
        return self._autocast and self.device_autocast.get(self._autocast, self._autocast)
