"""`isotype run --watch`: stops a script before the first update with a non-finite loss or gradient.

A hook on the model stores references to the inputs of the forwards in a step. A hook before each optimizer step reads
the values. torch's `backward` and `GradScaler.step` are wrapped, so that isotype knows the loss and skipped steps.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from isotype.compat.replaced import Replacements
from isotype.compat.torch import around_backward, around_scaler_step, no_modes
from isotype.core.errors import error_line
from isotype.core.optimizers import parameters_of
from isotype.core.random_states import RandomStates
from isotype.core.source import asking_line, shown
from isotype.model.loss import find_loss
from isotype.model.shard import process_count
from isotype.report.nonfinite import problem_of
from isotype.report.text import short_source
from isotype.trace.live.forward import named_inputs
from isotype.trace.live.recorder import device_of
from isotype.trace.nonfinite.again import StopReason, first_nonfinite

STOPPED = 1
"""Exit status of a script that `--watch` stops."""

_FORWARDS = 64
"""If a script never calls a torch optimizer, at most this number of forwards is stored."""


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward of the current step: references to its inputs, the random states before the forward, and its autocast."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    states: RandomStates
    autocast: AbstractContextManager[Any]


class Numbers:
    """Checks the loss and the gradients of a script's training. `say` prints a line. `stop` removes isotype's hooks from the script."""

    def __init__(self, say: Callable[[str], None], stop: Callable[[], None]) -> None:
        self._say, self._stop = say, stop
        self._model: nn.Module | None = None
        self._device = torch.device("cpu")
        self._forwards: deque[_Forward] = deque(maxlen=_FORWARDS)
        self._losses: list[torch.Tensor] = []
        self._backward_at = ""
        self._stop_reason = StopReason()
        self._steps = 0
        self._scaler: Any = None
        self._skipped = False
        self._hooks = Replacements()

    # ------------------------------------------------------------------------------------------ start and end

    def attach(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin to check the values of `model`. The forward with these arguments is about to run."""
        if self._model is not None:
            return
        self._model, self._device = model, torch.device(device_of(model))
        before, updating = partial(self._guard, self._forward), partial(self._guard, self._updating)
        self._hooks.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._hooks.callback(optimizers.register_optimizer_step_pre_hook(updating).remove)
        around_backward(self._hooks, self._around_backward)
        around_scaler_step(self._hooks, self._around_scaler)
        self._forward(model, args, kwargs)

    def detach(self) -> None:
        self._hooks.close()
        self._model = None
        self._end_step()

    def _guard(self, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Exception as error:  # noqa: BLE001 - an error in the watch must not end the script
            self._say(f"isotype no longer checks the values: {error_line(error)}")
            self.detach()

    # ----------------------------------------------------------------------------------------------- recording

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            kind = self._device.type
            autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            self._forwards.append(_Forward(args, dict(kwargs), RandomStates.current(self._device), autocast))

    def _around_backward(self, backward: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self._guard(self._backward, tensors)
        return backward(tensors, *args, **kwargs)

    def _backward(self, tensors: Any) -> None:
        losses = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        self._losses += [loss.detach() for loss in losses if not loss.dim()]
        self._backward_at = self._backward_at or shown(asking_line())

    def _around_scaler(
        self, step: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not scaler.is_enabled():
            return step(scaler, optimizer, *args, **kwargs)
        self._guard(self._unscaled, scaler)
        self._scaler, self._skipped = scaler, True
        result = step(scaler, optimizer, *args, **kwargs)
        self._scaler = None
        if self._skipped:
            self._guard(self._judge, 0.0, math.inf, scaler)
            self._end_step()
        return result

    def _unscaled(self, scaler: Any) -> None:
        """Check for NaN losses. An infinite loss is ignored: the loss scale may be its cause, and the GradScaler then skips the step."""
        if any(map(math.isnan, self._read(self._losses))):
            self._judge(math.nan, None, scaler)

    def _read(self, values: list[torch.Tensor]) -> list[float]:
        if not values:
            return []
        return torch.stack([value.float().to(self._device) for value in values]).tolist()

    def _updating(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._skipped = False
        if self._scaler is not None:  # the GradScaler has checked the gradients already
            self._judge(0.0, 0.0, self._scaler)
        else:
            all_gradients = (parameter.grad for parameter in parameters_of(optimizer))
            gradients = [grad for grad in all_gradients if grad is not None and grad.layout is torch.strided]
            norms = [torch.nn.utils.get_total_norm(gradients)] if gradients else []
            numbers = self._read([*self._losses, *norms])
            norm = numbers.pop() if gradients else None
            self._judge(sum(numbers), norm, None)
        self._end_step()

    def _end_step(self) -> None:
        self._steps += 1
        self._forwards.clear()
        self._losses.clear()

    # ----------------------------------------------------------------------------------------------------- judging

    def _judge(self, loss: float, norm: float | None, scaler: Any) -> None:
        what = self._stop_reason.of(loss, norm, None if scaler is None else scaler.get_scale)
        if what is None:
            return
        scale = None if scaler is None else float(scaler.get_scale())
        parts = {"loss": loss, "gradient norm": norm, "loss scale": scale}
        values = ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)
        self._say(f"{what}: the script was stopped before the update of step {self._steps + 1} ({values})")
        model, forwards = self._model, tuple(self._forwards)
        self._stop()
        if model is None or not forwards:
            self._say("the forward of this step was not recorded, so the step cannot be run again")
        else:
            self._explain(model, forwards, scale)
        raise SystemExit(STOPPED)

    def _explain(self, model: nn.Module, forwards: tuple[_Forward, ...], scale: float | None) -> None:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        if inner is model and process_count() > 1:
            self._say("the step was not run again, because other processes hold parts of the model")
            return
        where, outside = short_source(self._backward_at), False

        def step() -> Iterator[torch.Tensor]:
            nonlocal outside
            for forward in forwards:
                forward.states.restore()
                with forward.autocast:
                    output = inner(*forward.args, **forward.kwargs)
                loss = find_loss(output)
                outside = outside or loss is None
                if loss is not None:
                    if loss.requires_grad:
                        torch.autograd.backward((loss if scale is None else loss * scale).sum())
                    yield loss

        batches = [named_inputs(inner, forward.args, forward.kwargs) for forward in forwards]
        try:
            with no_modes():
                first = first_nonfinite(inner, step, batches, scale)
        except Exception as error:  # noqa: BLE001 - the stop was already reported; this is one more line
            self._say(f"the step could not be run again: {error_line(error)}")
            return
        if first is not None:
            self._say(f"the step, run again:\n  - {problem_of(first)}")
        elif outside:
            self._say(
                f"the model's outputs are finite, but the loss that the script computes from them is not (backward at {where})"
            )
        else:
            self._say(
                "in a repetition of the step, all values are finite, so later code of the script makes the loss or the gradients non-finite"
            )
