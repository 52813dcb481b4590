"""The real step: what `isotype.check` predicts, run on this machine's CPU with real tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.cpus import machine_only

Inputs = Mapping[str, Any] | Callable[[nn.Module], torch.Tensor]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw_fused": lambda parameters, **options: torch.optim.AdamW(parameters, fused=True, **options),
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class Outcome:
    """How a real step ended: where it raised, or the loss.

    Attributes:
        error: what was raised, None for a step that ran.
        phase: `forward`, `backward`, `unscale`, `optimizer` or `generate`; "" for a step that ran.
        module: the innermost module whose forward was running, "" outside of any.
        loss: the loss, where the forward got that far.
        nonfinite: the trained parameters that the optimizer's step left with NaN or infinity.
    """

    error: Exception | None
    phase: str = ""
    module: str = ""
    loss: torch.Tensor | None = None
    nonfinite: tuple[str, ...] = ()


def real_step(
    model: nn.Module,
    inputs: Inputs,
    autocast: torch.dtype | None = None,
    scaler: bool = False,
    optimizer: str = "adamw",
    learning_rate: float = 1e-3,
    phases: tuple[str, ...] = ("forward", "backward", "unscale", "optimizer"),
    generate: Callable[[nn.Module], Any] | None = None,
    device: str = "cpu",
) -> Outcome:
    """Run one real training step, with a real GradScaler and optimizer, and say how it ended; all is on `device`."""
    if device == "cpu":
        machine_only("the operators of a real step")
    loss: torch.Tensor | None = None
    phase = "forward"
    with _innermost(model) as where:
        try:
            with _autocast(autocast, device):
                loss = inputs(model) if callable(inputs) else loss_of(model(**inputs))
            where.clear()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            steps = OPTIMIZERS[optimizer](trained, lr=learning_rate) if "optimizer" in phases else None
            grad_scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=scaler)
            if "backward" in phases:
                phase = "backward"
                grad_scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if scaler and "unscale" in phases and steps is not None:
                phase = "unscale"
                grad_scaler.unscale_(steps)
            if steps is not None:
                phase = "optimizer"
                grad_scaler.step(steps)
                grad_scaler.update()
            if generate is not None:
                phase = "generate"
                where.clear()
                with torch.no_grad():
                    generate(model)
        except Exception as error:  # noqa: BLE001 - the verdict of the real step is what is asked for
            return Outcome(error, phase, where[-1] if where else "", loss)
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    nonfinite = tuple(name for name, value in trainable.items() if not value.detach().isfinite().all())
    return Outcome(None, loss=loss, nonfinite=nonfinite)


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a transformers output, else the mean of the first float tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    first: Any = output[0] if isinstance(output, (tuple, list)) else getattr(output, "logits", output)
    if not isinstance(first, torch.Tensor):
        first = next(
            value for value in output.values() if torch.is_tensor(value) and value.is_floating_point()
        )
    mean: torch.Tensor = first.float().mean()
    return mean


def _autocast(dtype: torch.dtype | None, device: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device, dtype=dtype) if dtype is not None else contextlib.nullcontext()


@contextlib.contextmanager
def _innermost(model: nn.Module) -> Iterator[list[str]]:
    """Names of the modules whose forward is running; an exception leaves the innermost one last."""
    stack: list[str] = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        # Not `always_call`: after an exception the stack has to stay as it was.
        handles.append(module.register_forward_hook(lambda *_: (stack.pop(), None)[1]))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()
