"""Reads the gradients of the step that an optimizer is about to make."""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from isotype.compat.standard import frame_above
from isotype.compat.torch import FakeTensor, last_node_number, no_modes, node_number, stored_scale, version_of
from isotype.core.dtypes import HALVES
from isotype.core.operators import COLLECTIVES
from isotype.core.optimizers import compensates, parameters_of
from isotype.core.source import asking_line, is_library, shown
from isotype.model.shard import is_flattened, process_count
from isotype.model.walk import living
from isotype.records.finding import in_library
from isotype.records.memory import Memory
from isotype.records.reach import Unreached
from isotype.records.trace import Origin
from isotype.trace.dtype_history import state_casts
from isotype.trace.live.recorder import LiveRecorder
from isotype.trace.live.terms import summands
from isotype.trace.recorder import ORIGIN

Sample = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]
_SAMPLE = 4096
_KEPT_STEPS = {1, 2, 3}
"""Numbers of steps, from 0. A script may keep some losses on purpose, so the losses of all these steps must be alive."""


def gradients_of(
    optimizer: torch.optim.Optimizer, recorder: LiveRecorder, roots: Sequence[nn.Module], unscaled: bool
) -> dict[str, Any]:
    """Return the fields of a `Trace` about the gradients of an optimizer's step, and two more entries.

    `plain` is True if this step computed the gradients without a loss scale. `idle` names the parameters that have no
    gradient and are in no optimizer.

    Args:
        unscaled: True if a GradScaler has unscaled gradients of this script.
    """
    weights = [*parameters_of(optimizer)]
    trained = [weight for weight in weights if weight.requires_grad]
    graded = [weight for weight in trained if weight.grad is not None]
    lost = [weight for weight in trained if weight.grad is None]
    updated = {id(weight) for weight in weights}
    optimizers = living(torch.optim.Optimizer)
    elsewhere = {id(w): w for other in optimizers for w in parameters_of(other) if id(w) not in updated}
    # Weights without a name are master copies of the model's parameters.
    all_of_model = all(weight.grad is None or id(weight) in recorder.names for weight in weights)
    left = [weight for root in roots for weight in root.parameters() if weight.requires_grad]
    left = [w for w in left if id(w) in recorder.names and id(w) not in updated and id(w) not in elsewhere]
    # With several optimizers, one of them may use the gradients of a loss that was not scaled.
    alone = all(weight.grad is None for key, weight in elsewhere.items() if key in recorder.names)
    divides = any(call.phase == "unscale" for call in recorder.calls)
    unscaled = unscaled or divides or getattr(optimizer, "grad_scale", None) is not None
    unscaled = unscaled or any(call.by_script and call.of_gradient for call in recorder.calls)
    scales = [scale for scaler in living(torch.amp.GradScaler) if (scale := stored_scale(scaler)) is not None]
    of_this_step = bool(graded) and all(id(weight) in recorder.graded for weight in graded)
    unmultiplied = of_this_step and not _multiplied(recorder, scales)
    return {
        "plain": unmultiplied and not divides,
        "reached": len(graded) if all_of_model else None,
        # A script that keeps some gradients has removed the others on purpose.
        "unreached": (*_lost(recorder, lost, clears=not graded), *_frozen(recorder, roots)),
        "orphans": sum(id(weight) not in recorder.names for weight in lost),
        "idle": {recorder.names[id(weight)].name for weight in left if weight.grad is None},
        "unheld": tuple(
            dict.fromkeys(recorder.names[id(w)].name for w in left if all_of_model and w.grad is not None)
        ),
        # The recorder has marked the loss scale if this step has multiplied a loss by it.
        "scaled": alone and not unscaled and any(hasattr(scale, ORIGIN) for scale in scales),
        "unscaled": unmultiplied and divides,
        "unequal": _unequal(optimizer, recorder, roots),
        "state_casts": state_casts.get(optimizer, ()),
    }


def _unequal(
    optimizer: torch.optim.Optimizer, recorder: LiveRecorder, roots: Sequence[nn.Module]
) -> tuple[str, str]:
    """Return why the processes' updates differ ("no_sync" or "scaler"), and the line; ("", "") if no reason is known."""
    if process_count() == 1:
        return "", ""
    updated = {id(weight) for weight in parameters_of(optimizer)}
    # DDP itself calls `c10d.broadcast_`.
    ops = (call.op for call in recorder.calls if call.by_script and call.op.startswith(f"{COLLECTIVES}."))
    averaged = any("broadcast" not in op for op in ops)
    local = (root for root in roots if id(root) in recorder.unsynced)
    for root in local if not averaged else ():
        if not updated.isdisjoint(map(id, root.parameters())):
            return "no_sync", recorder.unsynced[id(root)]
    # FSDP1's GradScaler has a process group. The recorder has marked the scale by which this step multiplied the loss.
    alone = (scaler for scaler in living(torch.amp.GradScaler) if not hasattr(scaler, "process_group"))
    scaled = any(hasattr(stored_scale(scaler), ORIGIN) for scaler in alone)
    return ("scaler", shown(asking_line())) if scaled and any(map(is_flattened, roots)) else ("", "")


def _lost(recorder: LiveRecorder, weights: Sequence[torch.Tensor], clears: bool) -> Iterator[Unreached]:
    """Yield the weights without a gradient that the forward has used. `clears`: code may have removed the gradients."""
    forward = (call for call in recorder.calls if call.phase == "forward")
    origins = ((operand.origin, call.module) for call in forward for operand in call.operands)
    used = {origin.name: module for origin, module in origins if origin.kind == "parameter"}
    for key in map(id, weights):
        origin, cleared = recorder.names.get(key), clears and key in recorder.graded
        if origin is not None and origin.name in used:
            cut = recorder.cuts.get(key, "")
            yield Unreached(origin.name, used[origin.name], ignored=True, cut=cut, cleared=cleared)


def _frozen(recorder: LiveRecorder, roots: Sequence[nn.Module]) -> Iterator[Unreached]:
    """Yield the weights that the forward has used before a line of code froze them."""
    weights = [weight for root in roots for weight in root.parameters() if id(weight) in recorder.frozen]
    weights = [weight for weight in weights if weight.grad is None and not weight.requires_grad]
    frozen = (key for key in map(id, weights) if key not in recorder.graded)
    names = {recorder.names[key].name: recorder.frozen[key] for key in frozen}
    for at, call in enumerate(recorder.calls):
        for operand in call.operands:
            line, before = names.get(operand.origin.name, ("", 0))
            if at < before and operand.origin.kind == "parameter" and call.phase == "forward":
                del names[operand.origin.name]
                yield Unreached(operand.origin.name, call.module, call.source, frozen=line)


def _multiplied(recorder: LiveRecorder, scales: Sequence[torch.Tensor]) -> bool:
    """Return whether the loss of the backward was multiplied by one of the loss scales."""
    origins = [getattr(scale, ORIGIN, None) for scale in scales]
    with no_modes():  # a recorded read would mark the scale
        numbers = [float(scale) for scale in scales]  # as in `loss * scaler.get_scale()`
    return any(
        any(operand.origin is origin for operand in call.operands for origin in origins)
        or any(number in numbers for _, number in call.numbers)
        for call in recorder.calls
        if call.phase == "backward" and not call.by_script
    )


def optimizers_here() -> list[torch.optim.Optimizer]:
    """Return all optimizers of this process, without accelerate's wrappers and the optimizers of a trace."""
    plain = (optimizer for optimizer in living(torch.optim.Optimizer) if not hasattr(optimizer, "optimizer"))
    firsts = ((optimizer, next(parameters_of(optimizer), None)) for optimizer in plain)
    return [
        optimizer for optimizer, first in firsts if first is not None and not isinstance(first, FakeTensor)
    ]


def samples_of(optimizer: torch.optim.Optimizer, names: Mapping[int, Origin]) -> list[Sample]:
    """Return a sample of each 16-bit parameter with a finite gradient: (name, parameter, mask, values).

    The values are the parameter's first elements; the mask is True where their gradient is not zero. The name is "" for
    a flat copy of parameters. The list is empty while a scheduler warms up, and if the optimizer may skip the step.
    """
    samples: list[Sample] = []
    copies = not any(id(weight) in names for weight in parameters_of(optimizer))
    for group in optimizer.param_groups if getattr(optimizer, "found_inf", None) is None else ():
        starts = 0 < float(group.get("lr", 0.0)) >= float(group.get("initial_lr", 0.0))
        for weight in group["params"] if starts else ():
            plain = type(weight) in (nn.Parameter, torch.Tensor) and type(weight.grad) is torch.Tensor
            origin = names.get(id(weight))
            if not plain or weight.dtype not in HALVES or (origin is None and not copies):
                continue
            if weight.grad.isfinite().all():
                some, gradient = weight.detach().reshape(-1)[:_SAMPLE], weight.grad.reshape(-1)[:_SAMPLE]
                samples.append(("" if origin is None else origin.name, weight, gradient != 0, some.clone()))
    return samples


def not_finite_in(optimizer: torch.optim.Optimizer, names: Mapping[int, Origin]) -> str:
    """Return the first parameter with a NaN or infinite gradient; "" without one, or if the optimizer may skip the step."""
    plain = [w for w in parameters_of(optimizer) if id(w) in names and type(w.grad) is torch.Tensor]
    skips = getattr(optimizer, "found_inf", None) is not None
    bad = (names[id(w)].name for w in plain if w.grad is not None and not w.grad.isfinite().all())
    return "" if skips else next(bad, "")


def after_step(optimizer: torch.optim.Optimizer, samples: Sequence[Sample]) -> dict[str, Any]:
    """Compare parameters with their values before the step. Return `unmoved`, `spoiled` and `compensated` of a `Trace`.

    A flat copy (named "") counts as `unmoved` if half of its values are unchanged, because small values still change.
    """
    later = compensates(optimizer)
    still, spoiled = [], []
    for name, weight, used, before in samples:
        now = weight.detach().reshape(-1)[:_SAMPLE]
        same = (now[used] == before[used]).sum()
        if not later and used.any() and same >= used.sum() * (1.0 if name else 0.5):
            still.append(name)
        if name and before.isfinite().all() and not now.isfinite().all():
            spoiled.append(name)
    return {"unmoved": tuple(still), "spoiled": tuple(spoiled), "compensated": later}


@dataclass(frozen=True)
class StepSeen:
    """A recorded step: the number of its operators, and its peaks of memory."""

    operators: int
    memory: Memory


class LastStep:
    """The line of an optimizer's last step, and one gradient of that step. If `optimizer` is None, no step has run yet."""

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._line = shown(asking_line())
        weights = () if optimizer is None else parameters_of(optimizer)
        gradients = [weight.grad for weight in weights if weight.grad is not None][:1]
        # A tensor's `__dict__` identifies it. `torch.utils.swap_tensors` would refuse a tensor with a weak reference.
        self._used = [(vars(g), version_of(g)) for g in gradients]

    def repeated_by(self, optimizer: torch.optim.Optimizer, unscales: bool) -> tuple[str, str] | None:
        """If the step that begins has the gradients of the last step, return the lines of both steps; else None.

        `unscales` is True if a GradScaler may have divided the gradients since the last step.
        """
        gradients = [weight.grad for weight in parameters_of(optimizer) if weight.grad is not None]
        for used, version in self._used:
            if any(vars(g) is used and (unscales or version_of(g) == version) for g in gradients):
                return self._line, shown(asking_line())
        return None


class IdleSteps:
    """Detects that an optimizer whose parameters had gradients steps twice without any gradient.

    If another optimizer steps with gradients in between, the idle steps are intended. A multi-task training computes
    gradients for one task, and calls `step` of all optimizers. Else `report` gets the number of the optimizer's
    parameters and the line of the step.
    """

    def __init__(self, report: Callable[[int, str], None]) -> None:
        self._report = report
        self._idle = WeakKeyDictionary[torch.optim.Optimizer, int]()
        self.detach = optimizers.register_optimizer_step_pre_hook(self._begins).remove

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or any(map(callable, (*args[1:], *kwargs.values()))):
            return  # a closure computes new gradients
        if any(weight.grad is not None for weight in parameters_of(optimizer)):
            self._idle.update(dict.fromkeys([optimizer, *self._idle], 0))
        elif optimizer in self._idle:
            self._idle[optimizer] += 1
            if self._idle[optimizer] == 2:
                frames = walk_stack(frame_above(1))
                places = (f"{frame.f_code.co_filename}:{line}" for frame, line in frames)
                script = (place for place in places if not (is_library(place) or in_library(place)))
                self._report(sum(1 for _ in parameters_of(optimizer)), next(script, shown(asking_line())))


class KeptGraphs:
    """Detects that a script keeps losses or outputs with their graphs, as `total += loss` does. Create it after a step."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._ends, self._optimizer = report, [last_node_number()], 0
        self.detach = optimizers.register_optimizer_step_pre_hook(self._begins).remove

    def _begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer = self._optimizer or id(optimizer)
        if self._optimizer != id(optimizer) or len(self._ends) > len(_KEPT_STEPS) + 1:
            return
        self._ends.append(last_node_number())
        if len(self._ends) > len(_KEPT_STEPS) + 1 and (kept := _kept(self._ends)):
            of_outputs, of_losses = ("outputs", "output.detach()"), ("losses", "loss.detach() or loss.item()")
            results, numbers = of_outputs if any(tensor.dim() for tensor in kept) else of_losses
            sentence = f"the {results} of earlier steps are kept with their graphs{_holder(kept)}"
            self._report(f"{sentence}: memory grows with every step; keep {numbers} instead")


def _kept(ends: Sequence[int]) -> list[torch.Tensor]:
    """Return the results of `_KEPT_STEPS` that are alive; an empty list if all results of one of these steps are gone."""
    if not _alive(ends):
        return []
    gc.collect(2)  # a loss in a reference cycle is not kept by the script
    return _alive(ends)


def _alive(ends: Sequence[int]) -> list[torch.Tensor]:
    steps = [(tensor, _steps(tensor, ends) & _KEPT_STEPS) for tensor in living(torch.Tensor)]
    all_kept = set[int]().union(*(numbers for _, numbers in steps)) == _KEPT_STEPS
    return [tensor for tensor, numbers in steps if numbers and all_kept]


def _steps(tensor: torch.Tensor, ends: Sequence[int]) -> set[int]:
    """Return the numbers of the steps that computed a tensor or, for a scalar, its terms."""
    if type(tensor) is not torch.Tensor or tensor.grad_fn is None:
        return set()
    if tensor.dim():
        return {bisect_left(ends, node_number(tensor.grad_fn))}
    after = {node for linear in summands(tensor.grad_fn) for node, _ in linear.next_functions if node}
    terms = {tensor.grad_fn, *after} - {*summands(tensor.grad_fn)}
    return {bisect_left(ends, node_number(term)) for term in terms}


def _holder(tensors: Sequence[torch.Tensor]) -> str:
    """Return " in NAME" for a local variable NAME that is, or contains, one of the tensors; "" if there is none."""
    wanted = {id(tensor) for tensor in tensors}
    for frame, _ in walk_stack(frame_above(1)):
        ours = "isotype" in frame.f_globals.get("__name__", "")
        for name, value in frame.f_locals.items() if not ours else ():
            if not wanted.isdisjoint(map(id, value if isinstance(value, list) else [value])):
                return f" in {name}"
    return ""
