"""Which layers read the same input: seen in one forward of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from isotype.lora.weights import shape_of
from isotype.model.modes import in_evaluation

_TOKENS = 4


def same_input(
    model: Any, layers: Mapping[str, nn.Module], inputs: Mapping[str, Any] | None
) -> tuple[list[tuple[str, ...]], str]:
    """Group the names of `layers`: children of one module that are called in a row with the very same tensor.

    Gradient checkpointing recomputes whole modules: what runs together must be found in one.

    Args:
        model: the model; run once in evaluation, without gradients. Its random states and modes stay as they are.
        layers: the layers by name.
        inputs: arguments of its forward; None for a few tokens.

    Returns:
        The groups, in which every layer occurs once, and why nothing was seen; empty where the model could be run.
    """
    calls: list[tuple[str, Any]] = []
    try:
        with ExitStack() as stack:
            for name, layer in layers.items():
                stack.callback(layer.register_forward_pre_hook(_noting(calls, name)).remove)
                if next(layer.parameters()).is_meta:
                    stack.enter_context(_blank(layer))
            stack.enter_context(in_evaluation(model))
            model(**(_tokens(model) if inputs is None else inputs))
        unseen = ""
    except Exception as error:  # noqa: BLE001 - whatever a model raises that was given too little
        calls, unseen = [], f"{type(model).__name__} could not be run: {str(error).partition(chr(10))[0]}"
    return _groups(list(layers), calls), unseen


def _noting(calls: list[tuple[str, Any]], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.append((name, args[0] if len(args) == 1 else object()))

    return hook


@contextmanager
def _blank(layer: Any) -> Iterator[None]:
    """Let a linear layer without weights return a tensor of the right shape: not every kernel knows the meta device."""
    rows, _ = shape_of(layer.get_base_layer())
    layer.__dict__["forward"] = lambda x, *_, **__: x.new_empty(*x.shape[:-1], rows)
    try:
        yield
    finally:
        del layer.__dict__["forward"]


def _tokens(model: Any) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    ids = torch.arange(1, 1 + _TOKENS, device=device)[None]
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {"input_ids": ids}
    return {"input_ids": ids, "decoder_input_ids": ids}


def _groups(names: list[str], calls: list[tuple[str, Any]]) -> list[tuple[str, ...]]:
    runs: list[list[str]] = []
    last: tuple[str, Any] = ("", None)
    for name, x in calls:
        parent = name.rpartition(".")[0]
        if parent == last[0] and x is last[1]:
            runs[-1].append(name)
        else:
            runs.append([name])
        last = (parent, x)
    groups: list[tuple[str, ...]] = []
    placed: set[str] = set()
    for run in runs:
        # A layer that is called twice with one tensor, or in other company another time, stays by itself.
        others = [other for other in runs if other is not run and set(other) & set(run)]
        alone = len(set(run)) < len(run) or any(other != run for other in others)
        for group in [(name,) for name in run] if alone else [tuple(run)]:
            if not placed & set(group):
                groups.append(group)
                placed |= set(group)
    return groups + [(name,) for name in names if name not in placed]
