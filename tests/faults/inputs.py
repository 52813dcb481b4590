"""Inputs, masks, autocast, checkpointing, scaler and optimizer."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from isotype.core.dtypes import dtype_name
from tests.faults.setup import Fault, Setup, cast, norms


def nothing(setup: Setup) -> str | None:
    """The model as it is."""
    return f"{type(setup.model).__name__} as it is"


def float_inputs_wide(setup: Setup) -> str | None:
    """Pixels or audio features in another dtype than the model."""
    names = [name for name, value in setup.batch.items() if value.is_floating_point()]
    for name in names:
        setup.batch[name] = setup.batch[name].to(setup.wide)
    return f"{', '.join(names)} in {dtype_name(setup.wide)}" if names else None


def embeds_wide(setup: Setup) -> str | None:
    """Embeddings of another dtype given in place of token ids."""
    embedding = setup.model.get_input_embeddings()  # type: ignore[operator]
    takes = "inputs_embeds" in inspect.signature(setup.model.forward).parameters
    if not takes or not isinstance(embedding, nn.Embedding) or set(setup.batch) != _TEXT:
        return None
    with torch.no_grad():
        embeds = embedding(setup.batch.pop("input_ids")).detach().to(setup.wide)
    setup.batch["inputs_embeds"] = embeds
    return f"inputs_embeds in {dtype_name(setup.wide)}"


_TEXT = {"input_ids", "attention_mask", "labels"}


def mask_float(setup: Setup) -> str | None:
    """The padding mask as floats of the wide dtype."""
    if "attention_mask" not in setup.batch:
        return None
    setup.batch["attention_mask"] = setup.batch["attention_mask"].to(setup.wide)
    return f"attention_mask in {dtype_name(setup.wide)}"


def mask_square(setup: Setup) -> str | None:
    """A causal mask of four dimensions, ready made in another dtype."""
    if set(setup.batch) != _TEXT:
        return None
    rows, length = setup.batch["input_ids"].shape
    lowest = torch.finfo(setup.wide).min
    mask = (
        torch.full((length, length), lowest, dtype=setup.wide).triu(1).expand(rows, 1, length, length).clone()
    )
    setup.batch["attention_mask"] = mask
    return f"a square attention_mask in {dtype_name(setup.wide)}"


def checkpointing(setup: Setup) -> str | None:
    """Gradient checkpointing: the forward runs again in the backward."""
    if not getattr(setup.model, "supports_gradient_checkpointing", False):
        return None
    setup.model.gradient_checkpointing_enable()  # type: ignore[operator]
    return "gradient checkpointing"


def checkpointing_norms_wide(setup: Setup) -> str | None:
    """Gradient checkpointing over norms of another dtype."""
    if checkpointing(setup) is None:
        return None
    for place in norms(setup.model):
        for parameter in place.module.parameters(recurse=False):
            cast(parameter, setup.wide)
    return f"gradient checkpointing, norms in {dtype_name(setup.wide)}"


def scaler(setup: Setup) -> str | None:
    """A GradScaler over the model's own parameters."""
    setup.scaler = True
    return f"a GradScaler over {dtype_name(setup.dtype)} parameters"


def fused_optimizer_mixed(setup: Setup) -> str | None:
    """Fused AdamW over norms of another dtype than the rest, in a step that autocast keeps whole."""
    setup.optimizer = "adamw_fused"
    found = norms(setup.model)
    for place in found[-1:]:
        for parameter in place.module.parameters(recurse=False):
            cast(parameter, setup.wide)
    return "fused AdamW, the last norm in another dtype" if found else None


def scaler_frozen_body(setup: Setup) -> str | None:
    """A GradScaler where only the norms are trained."""
    setup.scaler = True
    chosen = {id(parameter) for place in norms(setup.model) for parameter in place.module.parameters()}
    for parameter in setup.model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    return "a GradScaler, only the norms are trained" if chosen else None


_RARE = (float_inputs_wide,)

FAULTS: tuple[Fault, ...] = tuple(
    Fault(inject.__name__.replace("_", "-"), inject, rare=inject in _RARE)
    for inject in (
        float_inputs_wide,
        embeds_wide,
        mask_float,
        mask_square,
        checkpointing,
        checkpointing_norms_wide,
        scaler,
        scaler_frozen_body,
        fused_optimizer_mixed,
    )
)
HEALTHY = Fault("nothing", nothing)
