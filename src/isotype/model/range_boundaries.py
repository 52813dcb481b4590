"""Boundaries that a policy asks for because of value ranges: a float32 residual stream, and modules that are exceptions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from isotype.core.names import base_name
from isotype.model.boundary import BoundarySettings
from isotype.model.walk import (
    LINEAR_KINDS,
    Place,
    blocks_in,
    is_tuner_layer,
    own_float_parameters,
    places,
)
from isotype.precision.policy import ModuleException, PrecisionPolicy


def range_boundaries(
    model: nn.Module, all_places: Sequence[Place], policy: PrecisionPolicy
) -> dict[str, BoundarySettings]:
    """The boundaries that ranges need, by the place's name; nothing where the policy has neither exceptions nor a
    float32 residual stream."""
    if not policy.wide_residual and not policy.exceptions:
        return {}
    exceptions = {exception.module: exception for exception in policy.exceptions}
    blocks = {id(block) for block in blocks_in(model)}
    root = max((place.name for place in all_places if not base_name(place.name)), key=len, default="")
    wanted: dict[str, BoundarySettings] = {}
    inside = ""  # the block around the current place: modules come depth first
    for place in all_places:
        if not f"{place.name}.".startswith(f"{inside}."):
            inside = ""
        if id(place.module) in blocks:
            inside = inside or place.name
        if is_tuner_layer(place.module):
            continue
        settings = _of_exceptions(place, exceptions, policy.compute)
        if settings is None and policy.wide_residual:
            kind = _kind_in_stream(place, id(place.module) in blocks, place.name == root, bool(inside))
            settings = BoundarySettings(kind, policy.compute, torch.float32) if kind is not None else None
        if settings is not None:
            wanted[place.name] = settings
    return wanted


def computes_float32(settings: BoundarySettings | None) -> bool:
    """Whether a module with this boundary keeps its weights in float32 too."""
    if settings is None:
        return False
    return settings.kind == "float32" or (settings.kind, settings.compute) == ("compute", torch.float32)


def float32_by_ranges(model: nn.Module, policy: PrecisionPolicy) -> set[str]:
    """Names of the parameters of `model` that `policy` keeps in float32 because of value ranges."""
    all_places = tuple(places(model))
    wanted = range_boundaries(model, all_places, policy)
    return {
        f"{place.name}.{name}"
        for place in all_places
        if computes_float32(wanted.get(place.name))
        for name, _ in place.module.named_parameters(recurse=False)
    }


def _kind_in_stream(place: Place, block: bool, root: bool, inside_block: bool) -> str | None:
    """The boundary that a float32 residual stream needs at a place; None where its block's own is enough."""
    if place.tuner:
        return None
    if root:
        return "autocast"  # under which matmuls take float32 inputs in evaluation and generation too
    if place.kind == "norm":
        return "float32"
    if block or place.kind == "embedding":
        return "residual"
    # `generate` calls encoders, vision towers and projectors without the model around them.
    if not inside_block and place.kind in ("linear", "other") and own_float_parameters(place.module):
        return "autocast"
    return None


def _of_exceptions(
    place: Place, exceptions: dict[str, ModuleException], compute: torch.dtype
) -> BoundarySettings | None:
    name, wide = base_name(place.name), torch.float32
    if place.tuner:
        # lora_A meets what the layer meets: adapters are small enough to compute in float32.
        owner = name.rpartition(".")[0]
        return BoundarySettings("compute", wide) if place.kind == "linear" and owner in exceptions else None
    own = exceptions.get(name)
    if own is not None and own.how != "adapters":
        if place.kind in LINEAR_KINDS:
            return _of_linear(place, own, compute)
        # Its parameters are cast with its inputs; autocast is off inside.
        return BoundarySettings("compute", wide)
    inside = any(
        exception.how == "float32" and name.startswith(f"{outer}.")
        for outer, exception in exceptions.items()
        if outer
    )
    if inside and place.kind == "linear":
        return BoundarySettings("compute", compute, wide)
    if inside and place.kind == "linear8bit":
        return BoundarySettings("int8", compute, wide)
    return None


def _of_linear(place: Place, own: ModuleException, compute: torch.dtype) -> BoundarySettings:
    wide = torch.float32
    scalable = place.kind != "linear" or isinstance(place.module, nn.Linear)
    if place.kind == "linear8bit" or (own.how == "scale" and scalable):
        return BoundarySettings("scale", compute, wide, own.exponent)
    return BoundarySettings("float32" if place.kind == "linear4bit" else "compute", wide)
