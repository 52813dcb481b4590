"""Choice of each module's boundary under a policy.

Reasons: value ranges (a float32 residual stream, exceptions), the module's own float32 weights, or its output
dtype.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import PARAMETERS, own_parameters
from isotype.core.names import base_name
from isotype.model.boundary import BoundarySettings, original_class
from isotype.model.modes import result_of
from isotype.model.parts import entrances
from isotype.model.walk import (
    LINEAR_KINDS,
    Place,
    blocks_in,
    is_router,
    is_tuner_layer,
    own_float_parameters,
    places,
)
from isotype.precision.policy import ModuleException, PrecisionPolicy, is_pinned

_PLAIN = (bool, int, float, str, torch.dtype)
_ANSWERS: dict[Hashable, bool] = {}
"""Cache by class, dtypes and shapes of weights, and plain attributes, for the hundred norms of a model."""


def range_boundaries(
    model: nn.Module, all_places: Sequence[Place], policy: PrecisionPolicy
) -> dict[str, BoundarySettings]:
    """Return the boundaries for value ranges and routers, by the place's name; none if the policy has neither."""
    if not policy.wide_residual and not policy.exceptions and not policy.routers:
        return {}
    exceptions = {exception.module: exception for exception in policy.exceptions}
    blocks = {id(block) for block in blocks_in(model)}
    root = max((place.name for place in all_places if not base_name(place.name)), key=len, default="")
    wanted: dict[str, BoundarySettings] = {}
    inside = ""  # current block; places come depth first
    for place in all_places:
        if not f"{place.name}.".startswith(f"{inside}."):
            inside = ""
        if id(place.module) in blocks:
            inside = inside or place.name
        if is_tuner_layer(place.module):
            continue
        settings = _of_exceptions(place, exceptions, policy.compute)
        if settings is None and policy.routers and not policy.keep_frozen and is_router(place.module):
            # Their scores stay float32: all implementations of experts cast their products with them.
            settings = BoundarySettings("float32", policy.compute, torch.float32)
        if settings is None and policy.wide_residual:
            kind = _kind_in_stream(place, id(place.module) in blocks, place.name == root, bool(inside))
            settings = BoundarySettings(kind, policy.compute, torch.float32) if kind is not None else None
        if settings is not None:
            wanted[place.name] = settings
    return wanted


def tower_boundaries(model: nn.Module, policy: PrecisionPolicy) -> dict[str, BoundarySettings]:
    """Return the boundaries of towers of pictures or sound and of sound encoders, by name: they cast inputs."""
    peft: Any = model
    base = peft.get_base_model() if hasattr(model, "get_base_model") else model
    names = {id(module): name for name, module in model.named_modules()}
    boundaries = {}
    for tower in entrances(base):
        name = names[id(tower)]
        weight = next((f"{name}.{own}" for own, p in tower.named_parameters() if p.dim() > 1), name)
        dtype = torch.float32 if is_pinned(weight, policy.pinned) else policy.plain
        boundaries[name] = BoundarySettings("inputs", policy.compute, dtype)
    return boundaries


def computes_float32(settings: BoundarySettings | None) -> bool:
    """Return whether a module with this boundary keeps its weights in float32."""
    if settings is None:
        return False
    return settings.kind == "float32" or (settings.kind, settings.compute) == ("compute", torch.float32)


def float32_by_ranges(model: nn.Module, policy: PrecisionPolicy) -> set[str]:
    """Return the names of the parameters of `model` that `policy` keeps in float32 because of value ranges."""
    all_places = tuple(places(model))
    wanted = range_boundaries(model, all_places, policy)
    return {
        f"{place.name}.{name}"
        for place in all_places
        if computes_float32(wanted.get(place.name))
        for name, _ in place.module.named_parameters(recurse=False)
    }


def _kind_in_stream(place: Place, block: bool, root: bool, inside_block: bool) -> str | None:
    """Return the kind of boundary that a float32 residual stream needs at a place; None if its block's suffices."""
    if place.tuner:
        return None
    if root:
        return "autocast"  # so that matmuls accept float32 inputs in evaluation and generation too
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
        # lora_A has the layer's inputs: adapters are small enough to compute in float32.
        owner = name.rpartition(".")[0]
        return BoundarySettings("compute", wide) if place.kind == "linear" and owner in exceptions else None
    of_place = exceptions.get(name)
    if of_place is not None and of_place.how != "adapters":
        if place.kind in LINEAR_KINDS:
            scalable = place.kind != "linear" or isinstance(place.module, nn.Linear)
            if place.kind == "linear8bit" or (of_place.how == "scale" and scalable):
                return BoundarySettings("scale", compute, wide, of_place.exponent)
            return BoundarySettings("float32" if place.kind == "linear4bit" else "compute", wide)
        # Its parameters are cast with its inputs; autocast is off inside.
        return BoundarySettings("compute", wide)
    outer = tuple(f"{module}." for module, each in exceptions.items() if module and each.how == "float32")
    inside = name.startswith(outer)
    if inside and place.kind == "linear":
        return BoundarySettings("compute", compute, wide)
    if inside and place.kind == "linear8bit":
        return BoundarySettings("int8", compute, wide)
    return None


# ------------------------------------------------------------------------------------------------------ a module's own dtypes


def boundary_of_dtypes(place: Place, policy: PrecisionPolicy) -> BoundarySettings | None:
    """Return the boundary that the dtypes of a module's own parameters require."""
    kind = _kind_of_boundary(place, policy)
    if kind is None:
        return None
    # Neighbours get a boundary's outputs: float weights have the plain dtype, which is the compute dtype
    # except under autocast. Kinds that choose their own dtype are set where the two are equal.
    return BoundarySettings(kind, policy.plain if kind == "float32" else policy.compute)


def _kind_of_boundary(place: Place, policy: PrecisionPolicy) -> str | None:
    if place.kind == "linear8bit":
        return "int8"
    if place.tuner:
        return None
    parameters = own_float_parameters(place.module)
    pinned = any(is_pinned(f"{place.name}.{name}", policy.pinned) for name in parameters)
    if policy.plain == torch.float32:
        # Autocast would compute a pinned linear layer in 16 bits.
        return "float32" if pinned and place.kind == "linear" else None
    high = [p for p in parameters.values() if p.dtype == torch.float32]
    if not high:
        return "float32" if place.kind == "norm" and returns_float32(place.module, policy.plain) else None
    if place.kind == "linear4bit":
        return "bias"
    trained = place.adapter or any(p.requires_grad for p in high)
    if place.kind == "other":
        # In unknown modules, the author's code handles the pinned parameters.
        return "compute" if trained else None
    # An unpinned frozen linear layer in float32 is accidental (`keep_frozen`): compute as its neighbours do.
    return "compute" if place.kind == "linear" and (trained or not pinned) else "float32"


def returns_float32(norm: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a norm without its boundary returns float32 for an input of the 16-bit `dtype`.

    The norm runs on the meta device. False without weights, or if it needs more than a single tensor `[…, n]`.
    """
    weights = {name: each for name, each in own_parameters(norm).items() if each is not None}
    if all(each.dim() != 1 for each in weights.values()):
        return False
    settings = tuple((name, value) for name, value in vars(norm).items() if isinstance(value, _PLAIN))
    shapes = tuple((name, each.shape, each.dtype) for name, each in weights.items())
    key = (original_class(norm), settings, shapes, dtype)
    if key not in _ANSWERS:
        _ANSWERS[key] = _run_on_meta(norm, weights, dtype)
    return _ANSWERS[key]


def _run_on_meta(norm: nn.Module, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> bool:
    plain = original_class(norm)
    twin = object.__new__(plain)
    meta = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in weights.items()}
    blank = {name: nn.Parameter(each, requires_grad=False) for name, each in meta.items()}
    twin.__dict__.update(norm.__dict__, **{PARAMETERS: {**own_parameters(norm), **blank}})
    size = next(each.shape[0] for each in weights.values() if each.dim() == 1)
    output = result_of(partial(plain.forward, twin), torch.empty(1, size, dtype=dtype, device="meta"))
    return isinstance(output, torch.Tensor) and output.dtype == torch.float32
