"""Gradient checkpointing: activations recomputed in the backward instead of saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHECKPOINTING = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
"""A trainer's default arguments of `gradient_checkpointing_enable`."""


def checkpointing(arguments: Any) -> dict[str, Any] | None:
    """Return the trainer's arguments of `gradient_checkpointing_enable`; None if it is off.

    Without `offload`: a traced step has no other memory for activations.
    """
    if not arguments.gradient_checkpointing:
        return None
    options = dict(arguments.gradient_checkpointing_kwargs or {})
    options.pop("offload", None)
    layers = {"every_n_layers": options.pop("every_n_layers")} if "every_n_layers" in options else {}
    return {**({"gradient_checkpointing_kwargs": options} if options else CHECKPOINTING), **layers}


def needs_input_gradients(arguments: Mapping[str, Any] | None) -> bool:
    """Return whether checkpointing with these arguments needs gradients of embeddings (torch's reentrant kind)."""
    return bool((arguments or {}).get("use_reentrant"))


def checkpoint_gradients(model: Any, settings: Mapping[str, Any], *, adapters: bool) -> None:
    """Enable gradient checkpointing as isotype's trainers do, if the model supports it.

    `settings`: arguments of the model's `gradient_checkpointing_enable`; `adapters`: whether adapters are
    trained on a frozen model.
    """
    if not getattr(model, "supports_gradient_checkpointing", True):
        return
    own = dict(settings)
    arguments = own.pop("gradient_checkpointing_kwargs", None)
    if hasattr(model, "activation_checkpointing_enable"):  # transformers' name, as in its Trainer
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments, **own)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments, **own)
    if adapters and not needs_input_gradients(arguments):
        model.disable_input_require_grads()  # as the trainer does


def checkpointing_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the TrainingArguments values that enable checkpointing with `arguments` (None: disable it).

    transformers 5.23 has `activation_checkpointing` as a newer name of `gradient_checkpointing`.
    """
    names = ("gradient_checkpointing", "activation_checkpointing")
    if arguments is None:
        return dict.fromkeys(names, False)
    keywords = dict(arguments)
    settings = {**(keywords.pop("gradient_checkpointing_kwargs", None) or {}), **keywords}
    return dict.fromkeys(names, True) | {f"{name}_kwargs": settings for name in names}
