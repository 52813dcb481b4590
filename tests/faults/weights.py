"""Parameters and buffers of another dtype than the rest of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from isotype.core.dtypes import dtype_name
from isotype.model.walk import Place, places
from tests.faults.setup import Fault, Setup, cast, float_buffers, head, linears, middle, norms

HALVES = (torch.bfloat16, torch.float16)
_QUERIES = (
    "q_proj",
    "query",
    "q",
    "query_key_value",
    "qkv_proj",
    "c_attn",
    "q_lin",
    "to_q",
    "Wqkv",
    "query_proj",
)
_DOWN = ("down_proj", "fc2", "dense_4h_to_h", "c_proj", "wo", "fc_out", "w2", "output_linear", "lin2")
_ROUTERS = ("router", "gate", "gate_proj_router", "classifier", "w_gate")

Places = Callable[[nn.Module], list[Place]]


def _parameters_of(found: list[Place], dtype: torch.dtype, *names: str) -> str | None:
    changed = [
        (place, parameter)
        for place in found
        for name, parameter in place.module.named_parameters(recurse=False)
        if parameter.is_floating_point() and (not names or name in names)
    ]
    for _, parameter in changed:
        cast(parameter, dtype)
    return f"{changed[0][0].name} and {len(changed) - 1} more in {dtype_name(dtype)}" if changed else None


def _one(found: list[Place]) -> list[Place]:
    chosen = middle(found)
    return [chosen] if chosen else []


def _embeddings(model: nn.Module) -> list[Place]:
    return [place for place in places(model) if place.kind == "embedding"]


def _convolutions(model: nn.Module) -> list[Place]:
    return [place for place in places(model) if isinstance(place.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]


def _routers(model: nn.Module) -> list[Place]:
    return [
        place
        for place in places(model)
        if place.name.rpartition(".")[2] in _ROUTERS or "router" in type(place.module).__name__.lower()
    ]


def _experts(model: nn.Module) -> list[Place]:
    return [
        place
        for place in places(model)
        if any(parameter.ndim == 3 for parameter in place.module.parameters(recurse=False))
    ]


def norms_wide(setup: Setup) -> str | None:
    """Every norm in float32, as `prepare_model_for_kbit_training` leaves them."""
    return _parameters_of(norms(setup.model), setup.wide)


def one_norm_wide(setup: Setup) -> str | None:
    """One norm in the middle of the model."""
    return _parameters_of(_one(norms(setup.model)), setup.wide)


def last_norm_wide(setup: Setup) -> str | None:
    """The last norm before the head."""
    return _parameters_of(norms(setup.model)[-1:], setup.wide)


def norm_bias_wide(setup: Setup) -> str | None:
    """The bias of one layer norm, its weight left alone."""
    found = [
        place for place in norms(setup.model) if isinstance(getattr(place.module, "bias", None), nn.Parameter)
    ]
    return _parameters_of(_one(found), setup.wide, "bias")


def embeddings_wide(setup: Setup) -> str | None:
    """Every embedding, tied heads with it."""
    return _parameters_of(_embeddings(setup.model), setup.wide)


def head_wide(setup: Setup) -> str | None:
    """The output head alone, as a copy of its own where it was tied."""
    last = head(setup.model)
    weight = getattr(last, "weight", None)
    if last is None or not isinstance(weight, nn.Parameter):
        return None
    last.weight = nn.Parameter(weight.detach().to(setup.wide, copy=True))
    return f"the output head in {dtype_name(setup.wide)}"


def one_weight_wide(setup: Setup) -> str | None:
    """The weight of one linear layer, its bias left alone."""
    return _parameters_of(_one(linears(setup.model)), setup.wide, "weight")


def one_bias_wide(setup: Setup) -> str | None:
    """The bias of one linear layer, its weight left alone."""
    found = [place for place in linears(setup.model) if place.module.bias is not None]
    return _parameters_of(_one(found), setup.wide, "bias")


def one_weight_double(setup: Setup) -> str | None:
    """The weight of one linear layer in float64."""
    return _parameters_of(_one(linears(setup.model)), torch.float64)


def queries_wide(setup: Setup) -> str | None:
    """Every query projection."""
    return _parameters_of(linears(setup.model, _QUERIES), setup.wide)


def down_projection_other(setup: Setup) -> str | None:
    """One down projection in the other 16-bit dtype."""
    return _parameters_of(_one(linears(setup.model, _DOWN)), setup.other)


def second_half_other(setup: Setup) -> str | None:
    """Every parameter of the second half of the modules in the other 16-bit dtype."""
    found = [place for place in places(setup.model) if place.kind != "other"]
    return _parameters_of(found[len(found) // 2 :], setup.other)


def convolution_wide(setup: Setup) -> str | None:
    """One convolution: of a state-space block, an audio or a vision tower."""
    return _parameters_of(_convolutions(setup.model)[:1], setup.wide)


def routers_wide(setup: Setup) -> str | None:
    """The routers of a mixture of experts."""
    return _parameters_of(_routers(setup.model), setup.wide)


def experts_wide(setup: Setup) -> str | None:
    """The stacked experts of one layer."""
    return _parameters_of(_experts(setup.model)[-1:], setup.wide)


def tower_wide(setup: Setup) -> str | None:
    """A whole vision or audio tower, or an encoder."""
    tower = next(
        (
            place
            for place in places(setup.model)
            if any(word in place.name.rpartition(".")[2] for word in ("vision", "visual", "tower", "encoder"))
        ),
        None,
    )
    if tower is None:
        return None
    tower.module.to(setup.wide)
    return f"{tower.name} in {dtype_name(setup.wide)}"


def bare_parameters_wide(setup: Setup) -> str | None:
    """Parameters that are neither a layer's weight nor its bias: gates, tables, decay rates."""
    found = [place for place in places(setup.model) if place.kind == "other"]
    return _parameters_of(found, setup.wide)


def buffer_double(setup: Setup) -> str | None:
    """One float buffer in float64."""
    for name, module, own, buffer in float_buffers(setup.model):
        setattr(module, own, buffer.double())
        return f"{name} in float64"
    return None


def rotary_rounded(setup: Setup) -> str | None:
    """Rotary frequencies rounded to 16 bits, as `model.to(dtype)` does: silent."""
    changed = [item for item in float_buffers(setup.model) if "inv_freq" in item[2]]
    for _, module, own, buffer in changed:
        setattr(module, own, buffer.to(setup.other if setup.dtype == torch.float32 else setup.dtype))
    return f"{changed[0][0]} and {len(changed) - 1} more rounded" if changed else None


def buffers_other(setup: Setup) -> str | None:
    """Every float buffer in the other 16-bit dtype."""
    changed = list(float_buffers(setup.model))
    for _, module, own, buffer in changed:
        setattr(module, own, buffer.to(setup.other))
    return f"{changed[0][0]} and {len(changed) - 1} more in {dtype_name(setup.other)}" if changed else None


_RARE = (
    routers_wide,
    experts_wide,
    tower_wide,
    convolution_wide,
)

FAULTS: tuple[Fault, ...] = tuple(
    Fault(inject.__name__.replace("_", "-"), inject, rare=inject in _RARE)
    for inject in (
        norms_wide,
        one_norm_wide,
        last_norm_wide,
        norm_bias_wide,
        embeddings_wide,
        head_wide,
        one_weight_wide,
        one_bias_wide,
        one_weight_double,
        queries_wide,
        down_projection_other,
        second_half_other,
        convolution_wide,
        routers_wide,
        experts_wide,
        tower_wide,
        bare_parameters_wide,
        buffer_double,
        buffers_other,
        rotary_rounded,
    )
)
