"""Gradient checkpointing: activations that are computed again in the backward in place of being kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def needs_input_gradients(arguments: Mapping[str, Any] | None) -> bool:
    """Whether gradient checkpointing with these arguments needs a gradient of the embeddings: torch's reentrant kind does."""
    return bool((arguments or {}).get("use_reentrant"))


def checkpoint_gradients(model: Any, arguments: Mapping[str, Any], *, adapters: bool) -> None:
    """Let a model checkpoint its gradients as isotype's trainers do, where it can.

    Args:
        model: a transformers model, or a PEFT model of one; changed in place.
        arguments: of torch's checkpoint function.
        adapters: whether adapters are trained on a frozen model.
    """
    if not getattr(model, "supports_gradient_checkpointing", True):
        return
    given = dict(arguments) or None
    if hasattr(model, "activation_checkpointing_enable"):  # transformers' name for it, as in its Trainer
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=given)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given)
    if adapters and not needs_input_gradients(arguments):
        model.disable_input_require_grads()  # as the trainer's does
