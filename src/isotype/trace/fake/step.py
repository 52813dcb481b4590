"""A training step on fake tensors: forward, backward, unscale, optimizer, and generation on request."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import (
    FakeTensor,
    run_backward,
    storage_of,
    unscale_,
    without_functions,
    without_modes,
)
from isotype.compat.torch_casts import casts_in_place
from isotype.compat.transformers import fp8_kernels_replaced, has_fp8_layers
from isotype.contracts.contract import contracts_of
from isotype.contracts.pattern import Spelled
from isotype.core.dtypes import dtype_name
from isotype.core.errors import error_line
from isotype.core.names import base_name, grouped
from isotype.core.optimizers import (
    are_masters,
    compensates,
    kernels_of,
    make_optimizer,
    names_instead,
    optimizers_in,
    parameters_of,
    updates_of,
)
from isotype.core.source import line_of
from isotype.model.adapters import unmatched
from isotype.model.boundary import exponent_by_ranges
from isotype.model.repeated_layers import fold
from isotype.records.memory import Memory
from isotype.records.request import DEEPSPEED, UNSHARDED, LossOf, Setup, StepRequest, named_inputs
from isotype.records.trace import (
    NO_GRADIENT,
    NOT_SCALAR,
    NOTHING_UNSCALED,
    Breach,
    Call,
    Failure,
    Origin,
    Trace,
    Weight,
)
from isotype.trace.fake.code import (
    loss_function,
    loss_in,
    named_tensors,
    state_reached_by,
    surroundings,
    switches_of,
    tensors_of_loss,
)
from isotype.trace.fake.functions import Functions
from isotype.trace.fake.recorder import FakeRecorder
from isotype.trace.fake.sharded import ProcessMemory
from isotype.trace.fake.state_snapshot import Untouched
from isotype.trace.fake.twin import fake_inputs, fake_mode, restore_sharded, twin_of
from isotype.trace.fake.values import known_values
from isotype.trace.script import dtype_reasons, misspelt_arguments
from isotype.trace.sides import sides_of
from isotype.trace.weights import memory_kind, packed_bytes, state_tensors, tensors_and_weights, weights_of

Change = Callable[[nn.Module], object]


@casts_in_place()
def trace_step(
    request: StepRequest,
    setup: Setup,
    *,
    weights: Sequence[Weight] | None = None,
    change: Change | None = None,
    lines: Mapping[str, torch.dtype] | None = None,
    deadline: float = math.inf,
    untouched: Untouched | None = None,
    enough: Callable[[Trace], bool] | None = None,
) -> Trace:
    """Trace one step on a copy of its model on fake tensors (the twin).

    Args:
        request: the model, and the code that runs in the step.
        weights: the result of `weights_of(request.model)`, if the caller has it; None to call this slow function.
        change: a fix to try, which changes the twin before the step.
        lines: code changes to try, `file:line` -> dtype. In such a line, casts and new tensors get the dtype.
        deadline: latest end of the step by `time.monotonic`, in seconds. The step fails at its first operator after the
            deadline.
        untouched: the saved state outside of the twin, if several traces share it; None to save the state here.
        enough: function of the unfinished trace, called after a forward or backward in which an operator broke its
            contract. The trace ends if the function returns True.
    """
    model, untouched = request.model, untouched or state_reached_by(request)
    mode = fake_mode(setup.profile)
    twin = twin_of(model, mode, switches_of(loss_in(request.inputs)))
    # Before folding, since checkpointing may skip layers by number.
    if setup.gradient_checkpointing is not None:
        twin.gradient_checkpointing_enable(**setup.gradient_checkpointing)  # type: ignore[operator]
    if request.fold:
        fold(twin)
    with mode:
        if "backward" in setup.phases:
            twin.train()
        if change is not None:
            change(twin)
    recorder = FakeRecorder(contracts_of(setup.profile), setup.compute, mode, lines)
    recorder.deadline = deadline
    recorder.register_named("data", tensors_of_loss(loss_in(request.inputs)))
    recorder.register_named("input", _named(named_inputs(request.inputs)))
    recorder.register_model(model, twin)
    real = weights_of(model) if weights is None else weights
    step = _Step(request, twin, setup, recorder)
    step.real, step.enough = real, enough
    with_values = _with_history([weight for _, weight in step.weights], real, {})
    recorder.sides = sides_of(setup, with_values, recorder.inputs.values())
    try:
        with surroundings(), fp8_kernels_replaced(setup.profile.runs_fp8):
            failure = step.run()
    finally:
        restore_sharded(twin)
        untouched.restore()
    return replace(step.trace(), failure=failure, left=untouched.left)


def failed_trace(model: nn.Module, setup: Setup, error: Exception) -> Trace:
    """Return the trace of a step that raised `error` before it could start."""
    failure = Failure("load", "", line_of(error), error_line(error))
    return Trace(setup, (), (), {}, Memory({}), failure, model=type(model).__name__)


def _with_history(
    faked: Sequence[Weight], real: Sequence[Weight], before: Mapping[str, torch.dtype]
) -> tuple[Weight, ...]:
    """Return the twin's weights with the magnitudes of the real weights. `before`: name -> dtype before the step."""
    by_name = {weight.name: weight for weight in real}
    rows = []
    for weight in faked:
        was, values = before.get(weight.name, weight.dtype), by_name.get(weight.name, weight)
        names = ("largest", "median_magnitude", "exact_in", "unit", "gathered", "codes_set_at", "emptied_at")
        of_real = {name: getattr(values, name) for name in names}
        of_real["set_at"] = values.set_at if values.dtype == weight.dtype else ""
        rows.append(replace(weight, **of_real, was=None if was == weight.dtype else was))
    return tuple(rows)


class _Step:
    def __init__(self, request: StepRequest, twin: nn.Module, setup: Setup, recorder: FakeRecorder) -> None:
        self.request, self.twin, self.setup, self.recorder = request, twin, setup, recorder
        self.real: Sequence[Weight] = ()
        self.enough: Callable[[Trace], bool] | None = None
        self.mode, self.loss_of = recorder.fake, loss_function(request.inputs)
        kept = {p: state for o in optimizers_in(request.optimizer) for p, state in o.state.items()}
        # If the model is cast after the first step, the optimizer's state keeps its earlier dtype.
        self.states = {
            name: fake_inputs(kept[parameter], self.mode)
            for name, parameter in request.model.named_parameters()
            if parameter in kept
        }
        self.inputs = fake_inputs(named_inputs(request.inputs), self.mode)
        self.evaluated = fake_inputs(named_inputs(request.evaluation or {}), self.mode)
        # The values are copied outside of the modes: inside of a mode the copies would be fakes.
        self.known = known_values(_named(named_inputs(request.inputs)))
        self.known_of_evaluation = known_values(_named(named_inputs(request.evaluation or {})))
        self.notes: list[str] = []
        self.untraced: dict[str, str] = {DEEPSPEED: UNSHARDED} if setup.deepspeed else {}
        self.packed: dict[str, int] = {}  # bytes of each weight of torchao or quanto
        for name, parameter in request.model.named_parameters():
            if (size := packed_bytes(parameter)) is not None:
                # Such weights have kernels of their own: some of them have no backward.
                part = f"the kernels of {type(parameter).__name__} weights"
                self.untraced[part] = f"they are traced as dense {dtype_name(parameter.dtype)} weights"
                self.packed[name] = size
        if setup.profile.runs_fp8 and has_fp8_layers(request.model):
            self.notes.append(
                "matrix products of the same shapes are traced instead of transformers' FP8 kernels, "
                "which need the package kernels (pip install kernels)"
            )
        self.hooks = contextlib.ExitStack()
        self.loss: torch.Tensor | None = None
        self.reached: int | None = None
        self.without_effect: tuple[str, ...] = ()
        self.stepped: list[Any] = []
        self.unheld: tuple[str, ...] = ()
        self.orphans = 0
        self.states_bytes, self.gradient_bytes = 0, 0  # at the start of a later micro-batch
        self.weights = tensors_and_weights(twin)
        self.repeats = {id(parameter): weight.repeats for parameter, weight in self.weights}
        self.mode.repeats = self.repeats
        self.process = ProcessMemory(twin, setup, recorder.ledger, self.repeats)
        self.functions = Functions(recorder, setup.profile)

    def run(self) -> Failure | None:
        """Run the phases in order; return the error that ended the step early, or None."""
        self.recorder.watch(self.twin)
        # Python's garbage collector cannot see tensor hooks. If they stayed, the twin would never be freed.
        with self.hooks, self.mode, self.recorder, self.functions:
            self._weigh()
            for hook in self.process.watch():
                self.hooks.enter_context(hook)
            for phase, run in (
                ("forward", self._forward),
                ("backward", self._backward),
                ("unscale", self._unscale),
                ("optimizer", self._optimize),
                ("evaluate", self._evaluate),
                ("rollout", self._evaluate),
                ("generate", self._generate),
            ):
                if phase not in self.setup.phases:
                    continue
                with self.recorder.during(phase):
                    try:
                        run()
                        if self.mode.threaded is not None:
                            raise self.mode.threaded
                    except Exception as error:  # noqa: BLE001 - any error of the model's code ends the step
                        return self.recorder.failure(error)
                if phase in ("forward", "backward") and self._is_enough():
                    return None
        return None

    def _is_enough(self) -> bool:
        if self.enough is None or all(call.breach is None for call in self.recorder.calls):
            return False
        with without_modes(), without_functions():
            return self.enough(self.trace())

    def trace(self) -> Trace:
        request, before = self.request, {weight.name: weight.dtype for _, weight in self.weights}
        model = request.model
        recorder = self.recorder
        partial = getattr(self.loss_of, "partial", False)
        cuts = {} if partial else recorder.cuts
        memory = recorder.ledger.record(self.states_bytes, self.gradient_bytes)
        exponents = ((name, exponent_by_ranges(module)) for name, module in self.twin.named_modules())
        return Trace(
            setup=self.setup,
            calls=tuple(recorder.calls),
            weights=_with_history(weights_of(self.twin), self.real, before),
            modules={name: type(module).__name__ for name, module in model.named_modules()},
            memory=memory,
            notes=(*self.notes, *self.functions.attention.notes(memory.peak)),
            untraced={**self.untraced, **recorder.values.numbers.untraced()},
            model=type(model).__name__,
            input_dtypes=dict(recorder.inputs),
            reached=self.reached,
            unreached=tuple(recorder.gradients.unreached(cuts, recorder.frozen)),
            unheld=self.unheld,
            orphans=self.orphans,
            compensated=any(
                map(compensates, optimizers_in([*self.stepped, *optimizers_in(request.optimizer)]))
            ),
            partial=partial,
            without_effect=self.without_effect,
            unmatched=unmatched(model),
            misspelt=misspelt_arguments(),
            reasons=dtype_reasons(model),
            by_ranges={base_name(name): exponent for name, exponent in exponents if exponent is not None},
        )

    def _weigh_weights(self) -> None:
        ledger = self.recorder.ledger
        for tensor, weight in self.weights:
            kind, size = memory_kind(weight), self.process.local_bytes(tensor)
            size = self.packed.get(weight.name) if size is None else size
            ledger.count(tensor, kind, weight.repeats, size)
            self.recorder.module_tensors.setdefault(weight.module, []).append(
                (tensor, kind, weight.repeats, size)
            )
            for state in state_tensors(tensor, self.twin.get_submodule(weight.module)):
                # Codes that share the weight's storage are sharded with the weight; every process holds all scales.
                same = storage_of(state) == storage_of(tensor)
                ledger.count(state, "weights", weight.repeats, size if same else None)
                self.recorder.mark(state, Origin("state", state.dtype, weight.module, weight.module))
        if self.request.reference is not None:
            ledger.add(self.request.reference, ledger.alive(self.request.reference))

    def _weigh(self) -> None:
        ledger = self.recorder.ledger
        self._weigh_weights()
        for tensor, weight in self.weights:
            if weight.trainable and isinstance(tensor, FakeTensor):
                count = partial(self._count_gradient, weight.module, weight.repeats)
                self.hooks.enter_context(tensor.register_post_accumulate_grad_hook(count))  # type: ignore[no-untyped-call]
        for owner, moments in self.states.items():
            for key, moment in moments.items():
                if isinstance(moment, torch.Tensor):
                    name = f"the optimizer's {key} of {owner}"
                    self.recorder.mark(moment, Origin("outside", moment.dtype, name))
                    local = int(self.process.share * moment.untyped_storage().nbytes())
                    ledger.count(moment, "optimizer", local=local)
        self._enter(self.inputs, self.known)
        ledger.add("inputs", self.setup.ahead * ledger.alive("inputs"))

    def _enter(self, inputs: Any, known: Mapping[str, torch.Tensor]) -> None:
        """Count the memory of a batch, and store the values in `known`, on which the model's code may branch."""
        recorder = self.recorder
        for name, value in _named(inputs):
            if not isinstance(value, FakeTensor):  # in an object that is passed to the model unchanged
                recorder.stand_for(value, Origin("input", value.dtype, name))
                continue
            recorder.mark(value, Origin("input", value.dtype, name))
            recorder.reach.begin(name, value)
            recorder.ledger.count(value, "inputs")
            if name in known:
                recorder.known.give(value, known[name])
                recorder.values.give(value, known[name], counted=True)
                recorder.values.came_rounded(value, name)

    def _count_gradient(self, module: str, repeats: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # a fused function gives unused layers no gradient
            self.process.gradient(parameter, repeats, module)
            self.recorder.gradients.reached.add(id(parameter))

    def _autocast(self, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        dtype = self.setup.autocast if enabled else None
        return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def _forward(self) -> None:
        with self._autocast():
            self.loss = self.loss_of(self.twin, self.inputs)
        if self.loss is not None:
            # Padding behind a row changes no prediction of a causal model, so this mask has no effect in a working step
            # either.
            names = self.recorder.reach.without_effect(self.loss)
            self.without_effect = tuple(
                name for name in names if name != "attention_mask" or self._padded_in_front()
            )

    def _padded_in_front(self) -> bool:
        mask = self.known.get("attention_mask")
        return mask is not None and mask.dim() == 2 and bool((mask[:, 0] == 0).any())

    def _backward(self) -> None:
        reached = self.recorder.gradients.reached
        if self.loss is None or not self.loss.requires_grad:
            self.notes.append("no backward: nothing that the loss depends on is trainable")
            trains = any(weight.trainable or weight.adapter for _, weight in self.weights)
            if self.loss is not None and trains and not reached:  # else the loss has run a backward itself
                self._refuse("torch.autograd.backward", NO_GRADIENT, [("loss", self.loss)])
            return
        # As in a training loop, the backward holds the only reference to the loss and its graph.
        loss, self.loss = self.loss, None
        if loss.numel() != 1:
            self._refuse("torch.autograd.backward", NOT_SCALAR, [("loss", loss)])
        scaled = loss * 1024.0 if self.setup.scaler else loss
        # `torch.autograd.backward` would turn the function mode off during a recomputation.
        gradient = (torch.ones_like(scaled),)
        run_backward((scaled,), gradient, False, False, (), allow_unreachable=True, accumulate_grad=True)
        restore_sharded(self.twin)
        self.process.end_backward()
        if self.setup.accumulates > 1:
            self.gradient_bytes = self.recorder.ledger.alive("gradients")
        trainable = self._trainable()
        if all(isinstance(weight, FakeTensor) for weight in trainable):  # a DTensor has no counting hook
            # A parameter that the step moves (`model.to("cuda")`) keeps its gradient and loses its hook. A parameter
            # that the forward makes trainable has no hook.
            reached.update(id(weight) for weight in trainable if weight.grad is not None)
            self.reached = sum(id(weight) in reached for weight in trainable)

    def _refuse(self, function: str, message: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Record a call of a Python function (not an operator) that raises `message` for these tensors."""
        operands, breach = self.recorder.operands(tensors), Breach(message, False, None)
        self.recorder.calls.append(Call(function, self.recorder.phase, "", "", operands, (), breach=breach))

    def _trainable(self) -> list[torch.Tensor]:
        return [parameter for parameter in self.twin.parameters() if parameter.requires_grad]

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        named: Iterator[tuple[str, torch.Tensor]] = self.twin.named_parameters()
        trained = [(name, p) for name, p in named if p.requires_grad and p.grad is not None]
        for name, parameter in trained:
            self.recorder.mark_gradient(parameter, name)
        return trained

    def _unscale(self) -> None:
        """Unscale gradients dtype by dtype, like `GradScaler.unscale_`, which refuses float16 and complex gradients."""
        if not self.setup.scaler:
            return
        all_gradients = (parameter.grad for _, parameter in self._trained() if parameter.grad is not None)
        groups = grouped(all_gradients, lambda gradient: gradient.dtype)
        on = "cpu" if self.setup.profile.kind == "cpu" else "cuda"
        for dtype, gradients in groups.items():
            if dtype == torch.float16 or dtype.is_complex:
                kernel = f"\"_amp_foreach_non_finite_check_and_unscale_{on}\" not implemented for '{Spelled(dtype):name}'"
                says = kernel if dtype.is_complex else "Attempting to unscale FP16 gradients."
                self._refuse("GradScaler.unscale_", says, [("grad", gradient) for gradient in gradients])
            else:
                unscale_(gradients, torch.zeros(1), torch.ones(1))

    def _optimize(self) -> None:
        named = self._trained()
        trained = [parameter for _, parameter in named]
        if not trained:
            if self.setup.scaler and self.reached == 0:
                self._refuse("GradScaler.step", NOTHING_UNSCALED, [("parameter", self._trainable()[0])])
            return
        request: Any = self.request.optimizer
        if isinstance(request, str):  # a fix may name another optimizer
            request = self.setup.optimizer
        optimizers = optimizers_in(request)
        copies = [names_instead(optimizer, self.request.model) for optimizer in optimizers]
        # Copies of a script's optimizers have no parameters, and the script may have more optimizers. So it is unknown
        # which parameters are in no optimizer.
        in_optimizers = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        updated = updates_of(copies)
        if in_optimizers and (updated or not are_masters(in_optimizers, self.request.model)):
            self.orphans = 0 if updated else len(in_optimizers)
            self.unheld = tuple(name for name, _ in named if name not in updated)
        ledger = self.recorder.ledger
        ledger.kind, ledger.share = "optimizer", self.process.share  # Adagrad's constructor makes its states
        # The list keeps the states of the optimizers alive.
        updates = () if self.orphans else copies or [request]
        self.stepped = [self._step_of(optimizer, named) for optimizer in updates]
        ledger.kind, ledger.share = "activations", 1.0
        self.states_bytes = ledger.alive("optimizer")
        if self.request.evaluation is not None:  # as a training loop does after every step
            for parameter in trained:
                parameter.grad = None
            ledger.add("gradients", -ledger.alive("gradients"))

    def _step_of(self, request: Any, named: Sequence[tuple[str, torch.Tensor]]) -> Any:
        """Run an optimizer's step and return the optimizer. With custom kernels, only count its states."""
        ledger, states = self.recorder.ledger, self.states
        if members := updates_of(request):
            named = [(name, parameter) for name, parameter in named if name in members]
        if not named:  # such as the optimizer of a GAN's other network
            return None
        parameters = [parameter for _, parameter in named]
        optimizer = make_optimizer(request, parameters, self.setup.learning_rate, [name for name, _ in named])
        if isinstance(optimizer, str):
            name = request if isinstance(request, str) else type(request).__name__
            self.untraced[f"the step of optimizer {name}"] = optimizer
            if kernels := kernels_of(request):
                self.process.update(kernels, named, self.twin, on_cpu=self.setup.profile.kind == "cpu")
            return optimizer
        optimizer.state.update({parameter: states[name] for name, parameter in named if name in states})
        calls = self.recorder.calls
        before = len(calls)
        optimizer.step()
        for _, parameter in named:
            surplus = ledger.share * (self.repeats[id(parameter)] - 1)
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    ledger.add("optimizer", int(surplus * value.untyped_storage().nbytes()))
        sizes = [(parameter.nbytes, self.repeats[id(parameter)]) for parameter in parameters]
        whole, traced = sum(map(math.prod, sizes)), sum(size for size, _ in sizes)
        if whole > traced and any("._foreach_" in call.op and call.results for call in calls[before:]):
            # Such kernels allocate a tensor for every parameter at once, also in layers that are not traced.
            end, share = len(calls), ledger.share
            ledger.share *= whole / traced
            optimizer.step()
            ledger.share = share
            del calls[end:]
        return optimizer

    def _evaluate(self) -> None:
        """Count the memory of an evaluation or rollout between steps. Its calls repeat the forward's and are not recorded."""
        ledger, calls, twin = self.recorder.ledger, self.recorder.calls, self.twin
        before = len(calls)
        self._enter(self.evaluated, self.known_of_evaluation)
        twin.eval()
        with torch.no_grad(), self._autocast():
            result = loss_function(self.request.evaluation)(twin, self.evaluated)
        if isinstance(self.request.evaluation, LossOf) and self.request.evaluation.kept:
            size = sum(value.nbytes for _, value in named_tensors(result, ""))
            ledger.add("predictions", self.request.evaluation.kept * size)
        twin.train("backward" in self.setup.phases)
        del calls[before:]

    def _generate(self) -> None:
        with torch.no_grad(), self._autocast(self.setup.autocast_eval):
            if self.request.generate is not None:
                self.request.generate(self.twin)
            else:
                labels = inspect.signature(self.twin.forward).parameters.get("labels")
                required = labels is not None and labels.default is inspect.Parameter.empty
                inputs = {k: v for k, v in self.inputs.items() if required or k != "labels"}
                config = getattr(self.twin, "config", None)
                if "labels" in self.inputs and getattr(config, "is_encoder_decoder", False):
                    # A training forward derives the decoder's tokens from the labels.
                    inputs.setdefault("decoder_input_ids", torch.zeros_like(self.inputs["labels"]))
                self.loss_of(self.twin, inputs)


def _named(inputs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in inputs.items():
        yield from named_tensors(value, name)
