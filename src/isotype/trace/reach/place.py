"""Finds the module where a leak begins: the first module with equal inputs and different outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.core.operators import tensors_of


def logits_of(output: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the logits in a model's output, `[rows, tokens, …]` or `[rows, …]`; None if there are none."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    for logits in [named] if isinstance(named, torch.Tensor) else _floats(output):
        if logits.is_floating_point() and logits.dim() in (2, 3) and logits.shape[0] == ids.shape[0]:
            return logits
    return None


def gradients_of(model: nn.Module, loss: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Return the gradient of each trainable parameter; None if the loss does not use it. Return {} if the loss has no graph."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not trained or loss is None or not loss.requires_grad:
        return {}
    gradients = torch.autograd.grad(loss.sum(), list(trained.values()), allow_unused=True)
    return dict(zip(trained, gradients, strict=True))


def first_place(
    model: nn.Module, run: Callable[[Any], Any], before: Any, after: Any, where: torch.Tensor, least: float
) -> tuple[str, str]:
    """Return (name, class) of the first module with equal inputs and other outputs at the tokens `where`, or ("", "").

    `run` calls the model, with the inputs `before` and then `after`. `where` is a mask, `[rows, tokens]`. `least` is
    the smallest relative change that counts.
    """
    first, second = (_values(model, run, inputs, where) for inputs in (before, after))
    for name, (inputs, outputs) in second.items():
        if name not in first or not outputs or not name:
            continue
        inputs_before, outputs_before = first[name]
        if _differ(outputs_before, outputs, least) and not _differ(inputs_before, inputs, least):
            return name, type(model.get_submodule(name)).__name__
    return "", ""


def _values(
    model: nn.Module, run: Callable[[Any], Any], inputs: Any, where: torch.Tensor
) -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return the inputs and outputs of each module at the tokens `where`, in the order in which the modules return."""
    values: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def at_tokens(value: Any) -> list[torch.Tensor]:
        hidden = (x for x in _floats(value) if x.dim() >= 3 and x.shape[:2] == where.shape)
        return [tensor[where].clone() for tensor in hidden]

    def keep(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if name not in values:
            values[name] = (at_tokens((args, kwargs)), at_tokens(output))

    with torch.no_grad(), ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(keep, name), with_kwargs=True))
        run(inputs)
    return values


def _differ(before: list[torch.Tensor], after: list[torch.Tensor], least: float) -> bool:
    pairs = [(x, y) for x, y in zip(before, after, strict=False) if x.shape == y.shape and x.numel()]
    return any(float((x - y).abs().max()) > least * float(x.abs().max()) for x, y in pairs)


def _floats(values: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(values) if tensor.is_floating_point()]
