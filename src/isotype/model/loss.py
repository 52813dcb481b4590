"""Finds the loss in a model's output."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from isotype.compat.torch import node_number

NOT_TRAINABLE = "without a float tensor to train on"


def loss_of(output: Any) -> torch.Tensor:
    """Return the mean of the loss in a model's output, or of its first float tensor. Raise TypeError without one."""
    loss = find_loss(output)
    if loss is not None:
        return loss.mean() if loss.ndim else loss
    first = next(float_tensors(output), None)
    if first is None:
        raise TypeError(f"the model returned {type(output).__name__} {NOT_TRAINABLE}")
    return first.float().mean()


def is_partial(output: Any) -> bool:
    """Return True if `loss_of` selects one of several differentiable tensors, and therefore may miss parameters."""
    return sum(leaf.requires_grad for leaf in float_tensors(output)) > 1 and find_loss(output) is None


def find_loss(output: Any) -> torch.Tensor | None:
    """Return the field `loss` of a model's output, or a scalar that must be the loss; None without one.

    A scalar is the loss if it depends on all parameters that the output depends on. For example, the loss in
    nanoGPT's output `(logits, loss)` is such a scalar, but CLIP's temperature is not. The output of a detector is a
    mapping with several losses. If no single scalar depends on all these parameters, but the scalars together do,
    return their sum.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    floats = list(float_tensors(output))
    if len(floats) == 1 and not floats[0].ndim:
        return floats[0]
    trained = [leaf for leaf in floats if leaf.requires_grad]
    scalars = [leaf for leaf in trained if not leaf.ndim]
    if not scalars:
        return None
    behind = {id(leaf): {*ends_behind(leaf, set())} for leaf in trained}
    everything = set().union(*behind.values())
    for scalar in scalars:
        if behind[id(scalar)] == everything:
            return scalar
    together = set().union(*(behind[id(scalar)] for scalar in scalars))
    return sum(scalars[1:], scalars[0]) if isinstance(output, Mapping) and together == everything else None


def ends_behind(tensor: torch.Tensor, visited: set[int]) -> Iterator[Any]:
    """Yield the nodes that accumulate parameters' gradients for `tensor`. Nodes in `visited` are skipped. Other nodes are added to it."""
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and not node.next_functions:
            yield node
        elif node is not None and node_number(node) not in visited:
            visited.add(node_number(node))
            waiting += [following for following, _ in node.next_functions]


def float_tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from float_tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from float_tensors(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from float_tensors(getattr(output, field.name))
