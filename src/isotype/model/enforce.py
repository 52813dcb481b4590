"""Restores a precision policy on a model in memory, after other code has changed dtypes."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.compat.liger import without_liger
from isotype.compat.transformers import keep_weights
from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.errors import PrecisionError
from isotype.core.names import base_name, plural
from isotype.model.boundary import BoundarySettings, set_boundary
from isotype.model.boundary_choice import (
    boundary_of_dtypes,
    computes_float32,
    range_boundaries,
    tower_boundaries,
)
from isotype.model.experts.layer import use_where_needed
from isotype.model.experts.stack import QuantizedStack, adopt_stacks
from isotype.model.quantized import align_4bit, align_8bit, align_stack, quantization_state
from isotype.model.walk import Place, own_float_parameters, places
from isotype.precision.policy import PrecisionPolicy, is_pinned

POLICY_ATTRIBUTE = "precision_policy"

_PARAMETRIZED = ".parametrizations."


@dataclass(frozen=True)
class Change:
    """A change by `enforce`: the name of the parameter, buffer or module, and a description of the change (`before -> after`)."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def enforce_model(model: nn.Module, policy: PrecisionPolicy) -> tuple[Change, ...]:
    """Restore `policy` on `model` in place, and return the changes. A second call changes nothing.

    - Trainable parameters get the master dtype, frozen weights the storage dtype, and pinned weights float32. If the
      policy has `keep_frozen`, frozen weights keep their dtypes.
    - Quantization states and quantized layers get the compute dtype. Float32 buffers that other code has cast to 16 bits
      become float32 again. Their values stay rounded, except rotary frequencies, which are computed again.
    - Modules with float32 weights, and norms that always return float32, get a boundary, which casts outputs to the
      compute dtype.
    - isotype's function replaces the forward of quantized experts. Liger-Kernel's methods on the experts are removed.

    Raises:
        PrecisionError: the model is stored in another format than the policy's, or a quantized layer has lost its
            quantization state.
    """
    if policy.quantized or policy.trainable == "lora":
        keep_weights(model)
    liger = "Liger's forward -> the module's own, which follows the policy"
    by_expert = "bitsandbytes' parametrization -> isotype's, which dequantizes a few experts at a time"
    changes = [Change(name, liger) for name in without_liger(model)]
    changes += [Change(name, by_expert) for name in adopt_stacks(model)]
    all_places = tuple(places(model))
    _check_storage(model, all_places, policy)
    by_ranges = range_boundaries(model, all_places, policy)
    wanted = _wanted_dtypes(all_places, policy, by_ranges)
    boundaries = {**tower_boundaries(model, policy), **by_ranges}
    for place in all_places:
        changes += _parameters(place, wanted)
        changes += _quantization(place, policy, by_ranges.get(place.name.partition(_PARAMETRIZED)[0]))
        changes += _buffers(place, policy)
        settings = boundaries.get(place.name) or boundary_of_dtypes(place, policy)
        if set_boundary(place.module, settings):
            what = "boundary removed" if settings is None else f"{settings.kind} boundary set"
            changes.append(Change(place.name, what))
    use_where_needed(model)
    setattr(model, POLICY_ATTRIBUTE, policy)
    return tuple(changes)


def _check_storage(model: Any, all_places: Sequence[Place], policy: PrecisionPolicy) -> None:
    """Raise PrecisionError if the model is not stored in the format of the policy, because no cast can change this format."""
    quantized = [place for place in all_places if place.kind in _FORMATS]
    formats = ((place.name, _FORMATS[place.kind](place.module)) for place in quantized)
    other = sorted({f for name, f in formats if f is not None and f != policy.code_book_of(base_name(name))})
    # A model with a quantization config and no quantized layers has skipped all layers.
    configured = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    dense = any(place.kind == "linear" and not place.adapter for place in all_places)
    if not other and not (dense and policy.quantized and not quantized and not configured):
        return
    stored = f"{other[0]} weights" if other else "float weights in every linear layer"
    raise contradiction(f"{type(model).__name__} with {stored}", policy)


def contradiction(what: str, policy: PrecisionPolicy) -> PrecisionError:
    """Return the error for weights in another format than the storage format of the policy. `what` names the model or checkpoint."""
    return PrecisionError.of(
        "the weights have another format than the policy's storage",
        f"{what} under a policy with storage {policy.storage}",
        "the format in which the weights are stored",
        "resolve the policy for this model: isotype.resolve_precision(model, …); to quantize a float "
        "checkpoint, give isotype.load its path and the policy",
    )


_FORMATS: dict[str, Callable[[Any], str | None]] = {
    # None if the weight has lost its quantization state: `align_4bit` raises an error for it.
    "linear4bit": lambda layer: getattr(quantization_state(layer) or layer.weight, "quant_type", None),
    "linear8bit": lambda layer: "int8",
}


def policy_of(model: Any) -> PrecisionPolicy | None:
    policy = getattr(model, POLICY_ATTRIBUTE, None)
    return policy if isinstance(policy, PrecisionPolicy) else None


def summarize(changes: tuple[Change, ...]) -> list[str]:
    """Return a line for each kind of change with its count, beginning with the most frequent kind."""
    counts = Counter(change.what for change in changes)
    return [f"{what} ({plural(count, 'place')})" for what, count in counts.most_common()]


def dtypes_to_load(
    model: nn.Module, all_places: Sequence[Place], policy: PrecisionPolicy
) -> dict[nn.Parameter, torch.dtype]:
    """Return the dtype in which `policy` stores each unquantized float parameter, for a load."""
    by_ranges = range_boundaries(model, all_places, policy)
    return _wanted_dtypes(all_places, policy, by_ranges, frozen=policy.trainable == "lora")


def _wanted_dtypes(
    all_places: Sequence[Place],
    policy: PrecisionPolicy,
    by_ranges: Mapping[str, BoundarySettings],
    *,
    frozen: bool = False,
) -> dict[nn.Parameter, torch.dtype]:
    """Return the dtype of each unquantized float parameter. If several modules share a parameter, float32 takes precedence."""
    wanted: dict[nn.Parameter, torch.dtype] = {}
    for place in all_places:
        for parameter, dtype in _own_dtypes(place, policy, by_ranges.get(place.name), frozen).items():
            if wanted.get(parameter) != torch.float32:
                wanted[parameter] = dtype
    return wanted


def _own_dtypes(
    place: Place, policy: PrecisionPolicy, by_ranges: BoundarySettings | None, frozen: bool
) -> dict[nn.Parameter, torch.dtype]:
    wanted = {}
    pinned = False
    for name, parameter in own_float_parameters(place.module).items():
        trained = parameter.requires_grad and not frozen
        if trained or place.adapter:  # an inactive adapter may be trained later
            wanted[parameter] = policy.master
        elif policy.keep_frozen:
            wanted[parameter] = parameter.dtype
        elif is_pinned(f"{place.name}.{name}", policy.pinned):
            wanted[parameter], pinned = torch.float32, True
        else:
            wanted[parameter] = policy.plain
    # A norm's kernel needs weight and bias in one dtype, and so does Mamba's convolution, which has no autocast in
    # evaluation. A pinned linear layer computes in float32.
    alike = place.kind == "norm" or isinstance(place.module, nn.Conv1d) or (place.kind == "linear" and pinned)
    by_range = computes_float32(by_ranges) and not policy.keep_frozen
    if by_range or (alike and torch.float32 in wanted.values()):
        return dict.fromkeys(wanted, torch.float32)
    return wanted


def _parameters(place: Place, wanted: dict[nn.Parameter, torch.dtype]) -> Iterator[Change]:
    for name, parameter in own_float_parameters(place.module).items():
        dtype = wanted[parameter]
        if parameter.dtype == dtype:
            continue
        yield Change(place.full_name(name), f"{dtype_name(parameter.dtype)} -> {dtype_name(dtype)}")
        exchange(parameter, "data", parameter.data.to(dtype), dtype)


def exchange(parameter: Any, name: str, value: Any, dtype: torch.dtype) -> Callable[[], None]:
    """Set a parameter's `data` or `grad_dtype`, and cast its gradient. Return a function that undoes these changes."""
    before, gradient = getattr(parameter, name), parameter.grad

    def put(value: Any, gradient: torch.Tensor | None) -> None:
        parameter.grad = None
        setattr(parameter, name, value)
        parameter.grad = gradient

    put(value, None if gradient is None else gradient.to(dtype))
    return partial(put, before, gradient)


def _quantization(place: Place, policy: PrecisionPolicy, by_ranges: BoundarySettings | None) -> list[Change]:
    compute = policy.compute if by_ranges is None else by_ranges.compute
    changes: list[str] = []
    if isinstance(place.module, QuantizedStack):
        changes = align_stack(place.module, compute)
    elif place.kind == "linear4bit":
        changes = align_4bit(place.name, place.module, compute)
    elif place.kind == "linear8bit":
        changes = align_8bit(place.name, place.module)
    return [Change(place.name, what) for what in changes]


def _buffers(place: Place, policy: PrecisionPolicy) -> Iterator[Change]:
    """Cast rotary frequencies and pinned buffers from 16 bits to float32. Rotary frequencies get exact values."""
    rounded = {n: b for n, b in place.module.named_buffers(recurse=False) if b.dtype in HALVES}
    rotary = {name for name in rounded if "inv_freq" in name}
    fresh = dict(fresh_rotary(place.name, place.module).named_buffers(recurse=False)) if rotary else {}
    for name, buffer in rounded.items():
        full_name = place.full_name(name)
        if name in rotary:
            restored, how = fresh[name].to(buffer.device), "float32, computed again"
        elif is_pinned(full_name, policy.pinned):
            restored, how = buffer.float(), "float32"
        else:
            continue
        setattr(place.module, name, restored)
        yield Change(full_name, f"{dtype_name(buffer.dtype)} -> {how}")


def fresh_rotary(name: str, module: nn.Module) -> nn.Module:
    """Return a new rotary module with exact frequencies, computed from the config of `module`. `name` is for error messages."""
    config = getattr(module, "config", None)
    if config is None:
        what = f"{name} ({type(module).__name__}) has 16-bit inv_freq, but no config from which to compute it again"
        fix = "do not cast the whole model with .to(dtype); load it with isotype.load"
        raise PrecisionError.of("rotary frequencies were rounded", what, "float32 frequencies", fix)
    return type(module)(config=config)
