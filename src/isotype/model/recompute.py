"""Settings of gradient checkpointing, which computes activations again in the backward instead of saving them in the forward."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from isotype.compat.peft import why_whole_rows

CHECKPOINTING = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
"""A trainer's default arguments of `gradient_checkpointing_enable`."""


def checkpointing(arguments: Any) -> dict[str, Any] | None:
    """Return a trainer's arguments of `gradient_checkpointing_enable`, without `offload`; None if checkpointing is off."""
    if not arguments.gradient_checkpointing:
        return None
    options = dict(arguments.gradient_checkpointing_kwargs or {})
    options.pop("offload", None)
    layers = {"every_n_layers": options.pop("every_n_layers")} if "every_n_layers" in options else {}
    return {**({"gradient_checkpointing_kwargs": options} if options else CHECKPOINTING), **layers}


def needs_input_gradients(arguments: Mapping[str, Any] | None, model: Any) -> bool:
    """Return True if the output of the embeddings has to require gradients, for reentrant checkpointing or PEFT's aLoRA hooks."""
    return bool((arguments or {}).get("use_reentrant") or why_whole_rows(model))


def checkpoint_gradients(model: Any, settings: Mapping[str, Any], *, adapters: bool) -> None:
    """Enable checkpointing as isotype's trainers do, with these `settings`. `adapters`: True if only adapters are trained."""
    if not getattr(model, "supports_gradient_checkpointing", True):
        return
    others = dict(settings)
    arguments = others.pop("gradient_checkpointing_kwargs", None)
    if hasattr(model, "activation_checkpointing_enable"):  # transformers' newer name
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments, **others)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments, **others)
    if adapters and not needs_input_gradients(arguments, model):
        model.disable_input_require_grads()  # as the trainer does


def idle_checkpoints(model: nn.Module) -> tuple[str, ...]:
    """Return the trained modules with gradient checkpointing that recompute nothing, because they are in eval mode."""
    parts = ((name, part) for name, part in model.named_modules() if not part.training)
    on = ((name, part) for name, part in parts if vars(part).get("gradient_checkpointing"))
    return tuple(name for name, part in on if any(p.requires_grad for p in part.parameters()))


def checkpointing_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return fields of TrainingArguments that enable checkpointing with `arguments`, or disable it for None."""
    names = ("gradient_checkpointing", "activation_checkpointing")  # the newer name, in transformers 5.23
    if arguments is None:
        return dict.fromkeys(names, False)
    keywords = dict(arguments)
    settings = {**(keywords.pop("gradient_checkpointing_kwargs", None) or {}), **keywords}
    return dict.fromkeys(names, True) | {f"{name}_kwargs": settings for name in names}
