"""Runs a step a second time to find the first operator with a non-finite result; the model stays unchanged."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import own_buffers
from isotype.core.random_states import random_states_kept
from isotype.records.nonfinite import NonFinite
from isotype.trace.nonfinite.cause import is_finite
from isotype.trace.nonfinite.recorder import FirstNonFinite, FoundError


def first_nonfinite(
    model: nn.Module,
    step: Callable[[], Iterable[torch.Tensor]],
    batches: Sequence[Mapping[str, Any]] = (),
    scale: float | None = None,
    stop: bool = True,
) -> NonFinite | None:
    """Run a step and return its first operator with a non-finite result; None if all results are finite.

    Gradients, buffers, training modes and random states are restored at the end. If the step draws random numbers, the
    function `step` has to set the random states. Compiled code runs eagerly.

    Args:
        model: the model whose weights and gradients the step uses.
        step: function that runs the forward and backward of each micro-batch, and yields its loss.
        batches: the micro-batches in order, each with its tensors by name.
        scale: the loss scale of the step's backward. None without loss scaling; the gradient norm is then checked, too.
        stop: True to stop the step at the operator; False if other processes wait for the end of the step.
    """
    recorder = FirstNonFinite(model, scale, stop)
    losses = []
    with _untouched(model), torch.compiler.set_stance("force_eager"):
        with suppress(FoundError), recorder.watch(model), recorder:
            remaining = iter(batches)
            recorder.begin_batch(next(remaining, {}))
            for loss in step():
                losses.append(loss.detach())
                recorder.begin_batch(next(remaining, {}))
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if scale is None and gradients and all(type(grad) is torch.Tensor for grad in gradients):
                recorder.phase = "unscale"
                torch.nn.utils.get_total_norm(gradients)
        results = [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]
        if recorder.finding is None and not all(map(is_finite, results)):
            return recorder.suspect
    return recorder.finding


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Set `grad` to None in a `with` block; then restore gradients, buffers, training modes and random states."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    held = ((m, name, b) for m in model.modules() for name, b in own_buffers(m).items() if b is not None)
    buffers = [(m, name, buffer, buffer.detach().clone()) for m, name, buffer in held if not buffer.is_meta]
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with random_states_kept():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for holder, name, buffer, values in buffers:
                own_buffers(holder)[name] = buffer
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
        for module, mode in modes:
            module.training = mode


_SKIPS = 10
"""A training ends after this number of skipped steps in a row, if the loss scale is at most 1."""


class StopReason:
    """Decides after each step of a training whether the training may continue."""

    def __init__(self) -> None:
        self._skips = 0

    def of(self, loss: float, norm: float | None, scale: Callable[[], float] | None) -> str | None:
        """Return the reason why the training has to end; None if it may continue.

        A non-finite loss always ends the training. A non-finite gradient is normal with a GradScaler, which then skips
        the step and lowers the loss scale. `scale` is a function that returns the loss scale; None without a
        GradScaler.
        """
        if not math.isfinite(loss):
            return "the loss is not finite"
        if norm is None or math.isfinite(norm):
            self._skips = 0
            return None
        if scale is None:
            return "the gradient is not finite"
        self._skips += 1
        if self._skips < _SKIPS or scale() > 1:
            return None
        return f"the gradient is not finite at any loss scale: {self._skips} steps were skipped in a row"
