"""Rerun of a step to find the first operator with a non-finite result; the model is unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """Run a step under a recorder and return the first operator with a non-finite result; None if all are
    finite.

    Gradients, buffers, modules' modes and random states are restored; a step that draws random numbers sets
    its own states. Compiled code runs eagerly.

    Args:
        model: whose weights and gradients the step uses.
        step: runs forward, loss and backward of each micro-batch and yields its loss after the backward.
        batches: the micro-batches by name, in order.
        scale: the loss scale of the step's backward; without one the gradient norm is computed too.
        stop: end the step at the first one; False if other processes wait for later operators.
    """
    recorder = FirstNonFinite(model, scale, stop)
    losses = []
    with _untouched(model), torch.compiler.set_stance("force_eager"):
        handles = recorder.watch(model)
        try:
            with recorder:
                remaining = iter(batches)
                recorder.begin_batch(next(remaining, {}))
                for loss in step():
                    losses.append(loss.detach())
                    recorder.begin_batch(next(remaining, {}))
                if scale is None:
                    recorder.phase = "unscale"
                    _norm(model)
        except FoundError:
            pass
        finally:
            for handle in handles:
                handle.remove()
        broken = [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]
        if recorder.finding is None and not all(map(is_finite, broken)):
            return recorder.suspect
    return recorder.finding


def _norm(model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients and all(type(gradient) is torch.Tensor for gradient in gradients):
        torch.nn.utils.get_total_norm(gradients)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, modes and random states on exit; there are no gradients inside."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (holder, name, buffer, buffer.detach().clone())
        for holder in model.modules()
        for name, buffer in own_buffers(holder).items()
        if buffer is not None and not buffer.is_meta
    ]
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
"""Consecutive skipped steps, down to a loss scale of 1, after which a run is stopped."""


class Verdict:
    """Judges the steps of one training in order."""

    def __init__(self) -> None:
        self._skips = 0

    def of(self, loss: float, norm: float | None, scale: Callable[[], float] | None) -> str | None:
        """Return why the training has to end; None if it may continue.

        A non-finite gradient is normal under a GradScaler, which skips the step and lowers the scale, until
        the scale cannot be lowered. A non-finite loss always ends the training. `scale` reads the loss scale;
        None without a GradScaler.
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
