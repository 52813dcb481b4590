"""The origin of a leak: the first module with equal inputs and different outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def logits_of(output: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the logits in a model's output, `[rows, tokens, …]` or `[rows, …]`; None if there are none."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    candidates = (
        [named]
        if isinstance(named, torch.Tensor)
        else [tensor for tensor in _tensors(output) if tensor.dim() >= 2]
    )
    for logits in candidates:
        if logits.is_floating_point() and logits.dim() in (2, 3) and logits.shape[0] == ids.shape[0]:
            return logits
    return None


def gradients_of(model: nn.Module, loss: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Return the loss's gradient of each trainable parameter, None outside of its graph; {} without a graph."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not trained or loss is None or not loss.requires_grad:
        return {}
    gradients = torch.autograd.grad(loss.sum(), list(trained.values()), allow_unused=True)
    return dict(zip(trained, gradients, strict=True))


def first_place(
    model: nn.Module, run: Callable[[Any], Any], before: Any, after: Any, where: torch.Tensor, seen: float
) -> tuple[str, str]:
    """Return (name, class) of the first module that passes a change on to guarded tokens; ("", "") if none is
    found.

    Args:
        model: the model that `run` calls.
        run: calls the model with inputs.
        before: the inputs.
        after: the changed inputs.
        where: guarded tokens, `[rows, tokens]`.
        seen: smallest relative change that counts.
    """
    with torch.no_grad(), _Recorder(model, where) as recorder:
        run(before)
        first = recorder.values
        recorder.values = {}
        run(after)
    for name, (inputs, outputs) in recorder.values.items():
        if name not in first or not outputs or not name:
            continue
        earlier = first[name]
        if _differ(earlier[1], outputs, seen) and not _differ(earlier[0], inputs, seen):
            return name, type(model.get_submodule(name)).__name__
    return "", ""


class _Recorder:
    """Inputs and outputs of all modules at some tokens, in the order in which the modules end."""

    def __init__(self, model: nn.Module, where: torch.Tensor) -> None:
        self.values: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._model, self._where = model, where
        self._hooks: list[Any] = []

    def __enter__(self) -> _Recorder:
        for name, module in self._model.named_modules():
            hook = self._hook(name)
            self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name not in self.values:
                self.values[name] = (self._at((args, kwargs)), self._at(output))

        return keep

    def _at(self, value: Any) -> list[torch.Tensor]:
        shape = self._where.shape
        rows = [
            tensor
            for tensor in _tensors(value)
            if tensor.is_floating_point() and tensor.dim() >= 3 and tensor.shape[:2] == shape
        ]
        return [tensor[self._where].clone() for tensor in rows]


def _differ(before: list[torch.Tensor], after: list[torch.Tensor], seen: float) -> bool:
    for one, other in zip(before, after, strict=False):
        if (
            one.shape == other.shape
            and one.numel()
            and float((one - other).abs().max()) > seen * float(one.abs().max())
        ):
            return True
    return False


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _tensors(item)
