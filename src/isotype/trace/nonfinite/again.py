"""A step run once more, to find the first operator whose result is not finite; the model stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import own_buffers
from isotype.core.random_states import random_states_kept
from isotype.records.nonfinite import NonFinite
from isotype.trace.nonfinite.operands import is_finite
from isotype.trace.nonfinite.recorder import FirstNonFinite, FoundError


def first_nonfinite(
    model: nn.Module,
    step: Callable[[], Iterable[torch.Tensor]],
    batches: Sequence[Mapping[str, Any]] = (),
    scale: float | None = None,
    stop: bool = True,
) -> NonFinite | None:
    """Run a step under a recorder and name the first operator whose result is not finite.

    Gradients, buffers, modes of the modules and random states are afterwards what they were; a step that draws random
    numbers sets its own states. Compiled code runs eagerly.

    Args:
        model: whose weights and gradients the step uses.
        step: runs forward, loss and backward of each micro-batch and yields its losses, one after the backward of each.
        batches: what the micro-batches hold, by name, in their order.
        scale: the loss scale that the step's backward uses; without one the norm of the gradients is computed too.
        stop: leave the step at the first; False where other processes wait for the operators that follow.

    Returns:
        The first, None if every value of the step is finite.
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
    """Gradients, buffers, modes and random states afterwards are those from before; within, there are no gradients."""
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
