"""Gradient checkpointing: activations that are computed again in the backward in place of being kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHECKPOINTING = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
"""What a trainer gives to `gradient_checkpointing_enable` that is told no more than to do it."""


def checkpointing(arguments: Any) -> dict[str, Any] | None:
    """Return the arguments that the trainer gives to `gradient_checkpointing_enable`, None if it is off.

    But for `offload`: a step that is traced has no other memory to put activations into.
    """
    if not arguments.gradient_checkpointing:
        return None
    options = dict(arguments.gradient_checkpointing_kwargs or {})
    options.pop("offload", None)
    layers = {"every_n_layers": options.pop("every_n_layers")} if "every_n_layers" in options else {}
    return {**({"gradient_checkpointing_kwargs": options} if options else CHECKPOINTING), **layers}


def needs_input_gradients(arguments: Mapping[str, Any] | None) -> bool:
    """Whether gradient checkpointing with these arguments needs a gradient of the embeddings: torch's reentrant kind does."""
    return bool((arguments or {}).get("use_reentrant"))


def checkpoint_gradients(model: Any, settings: Mapping[str, Any], *, adapters: bool) -> None:
    """Let a model checkpoint its gradients as isotype's trainers do, where it can.

    Args:
        model: a transformers model, or a PEFT model of one; changed in place.
        settings: arguments of the model's `gradient_checkpointing_enable`.
        adapters: whether adapters are trained on a frozen model.
    """
    if not getattr(model, "supports_gradient_checkpointing", True):
        return
    own = dict(settings)
    arguments = own.pop("gradient_checkpointing_kwargs", None)
    if hasattr(model, "activation_checkpointing_enable"):  # transformers' name for it, as in its Trainer
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments, **own)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments, **own)
    if adapters and not needs_input_gradients(arguments):
        model.disable_input_require_grads()  # as the trainer's does


def checkpointing_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Values of TrainingArguments whose trainer checkpoints gradients by these arguments, by every name that it reads.

    transformers 5.23 has `activation_checkpointing` as the newer name of the same.

    Args:
        arguments: of the model's `gradient_checkpointing_enable`; None switches it off.
    """
    names = ("gradient_checkpointing", "activation_checkpointing")
    if arguments is None:
        return dict.fromkeys(names, False)
    keywords = dict(arguments)
    settings = {**(keywords.pop("gradient_checkpointing_kwargs", None) or {}), **keywords}
    return dict.fromkeys(names, True) | {f"{name}_kwargs": settings for name in names}
