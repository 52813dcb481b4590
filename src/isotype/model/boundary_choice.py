"""Chooses the boundaries of a policy: the modules whose inputs and outputs are cast.

A module needs a boundary in three cases: its weights are float32, it returns float32, or value ranges require a cast.
The cast is needed for a float32 residual stream, or for another dtype of this module.
"""

from collections.abc import Collection, Hashable, Sequence
from functools import partial

import torch
from torch import nn

from isotype.compat.peft import without_peft
from isotype.compat.torch import BUFFERS, own_buffers, own_modules, own_parameters
from isotype.core.names import base_name, in_module
from isotype.model.boundary import BoundarySettings, original_class, sharing
from isotype.model.modes import in_evaluation, result_of
from isotype.model.parts import entrances, towers_of
from isotype.model.read_weights import layers_read
from isotype.model.walk import Place, blocks_in, is_router, is_tuner_layer, own_float_parameters, places
from isotype.precision.policy import ModuleException, PrecisionPolicy, is_pinned

_PLAIN = (bool, int, float, str, torch.dtype)
_OUTPUTS: dict[Hashable, torch.dtype | str | None] = {}
"""Cache of `output_of`. A hundred norms of a model have the same key (class, settings, shapes, dtype)."""


def range_boundaries(
    model: nn.Module, all_places: Sequence[Place], policy: PrecisionPolicy
) -> dict[str, BoundarySettings]:
    """Return the boundaries of `policy` that follow from value ranges or float32 routers, by module name."""
    if not policy.wide_residual and not policy.exceptions and not policy.routers:
        return {}
    exceptions = {exception.module: exception for exception in policy.exceptions}
    read = {base_name(name) for name in layers_read(model)} if exceptions else set()
    blocks = {id(block) for block in blocks_in(model)}
    root = max((place.name for place in all_places if not base_name(place.name)), key=len, default="")
    wanted: dict[str, BoundarySettings] = {}
    inside = ""  # name of the block around the current place: places come depth first
    for place in all_places:
        if not in_module(place.name, inside):
            inside = ""
        if id(place.module) in blocks:
            inside = inside or place.name
        if is_tuner_layer(place.module):
            continue
        settings = _of_exceptions(place, exceptions, read, policy.compute)
        if settings is None and policy.routers and not policy.keep_frozen and is_router(place.module):
            # The router's scores stay float32: all implementations of experts cast their products to this dtype.
            settings = BoundarySettings("float32", policy.compute, torch.float32)
        if settings is None and policy.wide_residual:
            kind = _kind_in_stream(place, id(place.module) in blocks, place.name == root, bool(inside))
            settings = BoundarySettings(kind, policy.compute, torch.float32) if kind is not None else None
        if settings is not None:
            wanted[place.name] = settings
    return wanted


def tower_boundaries(model: nn.Module, policy: PrecisionPolicy) -> dict[str, BoundarySettings]:
    """Return the boundaries for vision towers, audio towers, speech encoders and modules around them, by module name."""
    names = {id(module): name for name, module in model.named_modules()}
    boundaries = {}
    base = without_peft(model)
    stream = torch.float32 if policy.wide_residual else policy.plain
    for _, tower in towers_of(base):
        around = names[id(tower)].rpartition(".")[0]
        if around != names[id(base)]:
            boundaries[around] = BoundarySettings("merger", policy.compute, stream)
    for tower in entrances(base):
        name = names[id(tower)]
        weight = next((f"{name}.{key}" for key, p in tower.named_parameters() if p.dim() > 1), name)
        dtype = torch.float32 if is_pinned(weight, policy.pinned) else policy.plain
        boundaries[name] = BoundarySettings("inputs", policy.compute, dtype)
    return boundaries


def computes_float32(settings: BoundarySettings | None) -> bool:
    """Return True if a module with this boundary keeps its weights in float32."""
    return settings is not None and (
        settings.kind == "float32" or (settings.kind == "compute" and settings.compute == torch.float32)
    )


def float32_by_ranges(model: nn.Module, policy: PrecisionPolicy) -> set[str]:
    """Return the names of the parameters that `policy` keeps in float32 because of their value ranges."""
    all_places = tuple(places(model))
    wanted = range_boundaries(model, all_places, policy)
    wide = (place for place in all_places if computes_float32(wanted.get(place.name)))
    return {f"{p.name}.{name}" for p in wide for name, _ in p.module.named_parameters(recurse=False)}


def _kind_in_stream(place: Place, block: bool, root: bool, inside_block: bool) -> str | None:
    """Return the kind of boundary that a module needs if the residual stream is float32; None if it needs no boundary."""
    if place.tuner:
        return None
    if root:
        return "autocast"  # so that matmuls accept float32 inputs, also in evaluation and generation
    if place.kind == "norm":
        return "float32"
    if block or place.kind == "embedding":
        return "residual"
    # `generate` calls encoders, vision towers and projectors without the model.
    if not inside_block and place.kind in ("linear", "other") and own_float_parameters(place.module):
        return "autocast"
    return None


def _of_exceptions(
    place: Place, exceptions: dict[str, ModuleException], read: Collection[str], compute: torch.dtype
) -> BoundarySettings | None:
    name, wide = base_name(place.name), torch.float32
    if place.tuner:
        # lora_A has the layer's inputs. Adapters are small enough for float32.
        owner = name.rpartition(".")[0]
        return BoundarySettings("compute", wide) if place.kind == "linear" and owner in exceptions else None
    exception = exceptions.get(name)
    if exception is not None and exception.how != "adapters":
        scalable = place.kind == "linear4bit" or isinstance(place.module, nn.Linear)
        if place.kind == "linear8bit" or (exception.how == "scale" and scalable):
            return BoundarySettings("scale", compute, wide, exception.exponent)
        return BoundarySettings("float32" if place.kind == "linear4bit" else "compute", wide)
    outer = tuple(f"{name}." for name, other in exceptions.items() if name and other.how == "float32")
    if not name.startswith(outer):
        return None
    if place.kind in ("linear", "linear8bit") and name not in read:
        return BoundarySettings("compute" if place.kind == "linear" else "int8", compute, wide)
    # Without autocast, code that reads weights of layers, or of experts that it calls, needs float32 weights.
    float32 = place.kind in ("linear", "other") and own_float_parameters(place.module)
    return BoundarySettings("compute", wide) if float32 else None


# ------------------------------------------------------------------------------------------ a module's own dtypes


def boundary_of_dtypes(place: Place, policy: PrecisionPolicy) -> BoundarySettings | None:
    """Return the boundary that a module needs because of its parameters' dtypes; None if the module needs none."""
    kind = _kind_of_boundary(place, policy)
    if kind is None:
        return None
    # The float weights of the next modules have the policy's plain dtype. It differs from the compute dtype only under
    # autocast, where "float32" is the only kind of boundary.
    return BoundarySettings(kind, policy.plain if kind == "float32" else policy.compute)


def _kind_of_boundary(place: Place, policy: PrecisionPolicy) -> str | None:
    if place.kind == "linear8bit":
        return "int8"
    if place.tuner:
        return None
    parameters = own_float_parameters(place.module)
    pinned = any(is_pinned(f"{place.name}.{name}", policy.pinned) for name in parameters)
    if policy.plain == torch.float32:
        # Under autocast a pinned linear layer would compute in 16 bits.
        return "float32" if pinned and place.kind == "linear" else None
    shared = type(place.module).__name__.endswith("InklingSharedExperts")
    if shared and policy.routers and not policy.wide_residual:
        return "compute"  # its last matmul has activations that are multiplied by the router's float32 scores
    high = [p for p in parameters.values() if p.dtype == torch.float32]
    if not high:
        norm = place.kind == "norm" and output_of(place.module, policy.plain) == "cast"
        return "float32" if norm else None
    if place.kind == "linear4bit":
        return "bias"
    trained = place.adapter or any(p.requires_grad for p in high)
    if place.kind == "other" and not trained:
        # The author's code of a module handles its pinned parameters, if it has other parts, too.
        alone = _only_pins(place, policy.pinned)
        return "float32" if alone and output_of(place.module, policy.plain) == "cast" else None
    # A frozen linear layer that is float32 without a pin (`keep_frozen`) computes in the compute dtype, like the others.
    inexact = place.kind == "other" or (place.kind == "linear" and (trained or not pinned))
    return "compute" if inexact else "float32"


def _only_pins(place: Place, patterns: Sequence[str]) -> bool:
    names = own_float_parameters(place.module)
    return not own_modules(place.module) and all(is_pinned(place.full_name(n), patterns) for n in names)


def uncast_pins(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns of pinned parameters and buffers in modules whose outputs no boundary casts to 16 bits."""
    uncast: set[str] = set()
    for place in places(model) if patterns else ():
        names = [place.full_name(n) for n in (*own_parameters(place.module), *own_buffers(place.module))]
        matches = {pattern for pattern in patterns if any(is_pinned(name, (pattern,)) for name in names)}
        if matches and place.kind == "other":
            alone = not is_router(place.module) and _only_pins(place, patterns)
            output = output_of(place.module, torch.bfloat16, torch.float32) if alone else None
            uncast |= set() if output in ("cast", torch.bfloat16) else matches
    return tuple(sorted(uncast))


def output_of(
    module: nn.Module, dtype: torch.dtype, stored: torch.dtype | None = None
) -> torch.dtype | str | None:
    """Return the dtype that a module without a boundary returns for an input in `dtype`; None if it is not known.

    Return "cast" if the module accepts only float32 inputs, or returns float32 (except with a matrix, because its author
    has chosen that). A copy of the module runs on the CPU, on zeros of shape `[1, n]`. All its weights are in `stored`,
    or in their own dtypes.
    """
    settings = tuple((name, value) for name, value in vars(module).items() if isinstance(value, _PLAIN))
    weights = own_parameters(module).items()
    shapes = tuple((n, w.shape, stored or w.dtype) for n, w in weights if w is not None)
    size = max((shape for _, shape, _ in shapes), key=len, default=())
    key = (original_class(module), settings, shapes, dtype)
    if key not in _OUTPUTS and shapes and len(size) <= 2:
        buffers = own_buffers(module).items()
        inputs = (torch.zeros(1, *size[-1:], dtype=d) for d in (torch.float32, dtype))
        with in_evaluation(module):
            twin = sharing(module, {name: torch.zeros(shape, dtype=kind) for name, shape, kind in shapes})
            vars(twin)[BUFFERS] = {
                n: b if b is None else torch.zeros(b.shape, dtype=b.dtype) for n, b in buffers
            }
            forward = partial(original_class(module).forward, twin)
            exact, narrow = (getattr(result_of(forward, x), "dtype", None) for x in inputs)
        needs = exact is not None if narrow is None else narrow == torch.float32 and len(size) < 2
        _OUTPUTS[key] = "cast" if needs else narrow
    return _OUTPUTS.get(key)
