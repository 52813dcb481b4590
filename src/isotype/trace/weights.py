"""Table of a model's parameters and buffers: dtypes, shapes, roles, quantization states, magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from isotype.compat.torch import FakeTensor
from isotype.compat.transformers import pinned, pinned_strictly
from isotype.core.names import unparametrized
from isotype.model.experts.stack import QuantizedStack, held_stack
from isotype.model.finite import all_finite
from isotype.model.fold import repeats_of
from isotype.model.quantized import quantization_state, repacking, row_scales
from isotype.model.walk import Place, kind_of, places
from isotype.precision.policy import is_pinned
from isotype.records.memory import MemoryKind
from isotype.records.trace import Quantization, Weight

# Medians and digits of larger tensors are not computed: norms, biases and adapters are far smaller.
_LOOKED_AT = 1 << 24


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """Return every parameter and buffer of `model` once, with the other names of tied ones."""
    pinned = _pinned_patterns(model)
    rows: dict[int, Weight] = {}
    alive: list[torch.Tensor] = []  # otherwise two new tensors of a container could get one id
    repeats = repeats_of(model)
    for place in places(model):
        tensors = [
            *((name, parameter, False) for name, parameter in place.module.named_parameters(recurse=False)),
            *((name, buffer, True) for name, buffer in place.module.named_buffers(recurse=False)),
        ]
        for own, tensor, buffer in tensors:
            full = unparametrized(f"{place.name}.{own}" if place.name else own)
            known = rows.get(id(tensor))
            if known is not None:
                rows[id(tensor)] = _tied(known, full)
                continue
            alive.append(tensor)
            largest, median_magnitude = _magnitudes(tensor, buffer)
            rows[id(tensor)] = Weight(
                name=full,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                buffer=buffer,
                trainable=tensor.requires_grad,
                adapter=place.adapter,
                module=place.name,
                module_class=type(place.module).__name__,
                kind=place.kind,
                pinned=is_pinned(full, pinned),
                quantization=_quantization(place, own),
                repeats=repeats[place.name],
                largest=largest,
                median_magnitude=median_magnitude,
                exact_in=_exact_in(tensor, buffer),
            )
    return tuple(rows.values())


def unread_weights(model: nn.Module) -> Iterator[Weight]:
    """Yield the parameters of `model` with names, dtypes and shapes, without reading values; no buffers.

    Parameters of lazy layers have no shape yet and are left out.
    """
    pinned = _pinned_patterns(model)
    seen: dict[int, torch.Tensor] = {}
    for place in places(model):
        for own, parameter in place.module.named_parameters(recurse=False):
            if id(parameter) in seen or isinstance(parameter, UninitializedParameter):
                continue
            seen[id(parameter)] = parameter
            name = unparametrized(f"{place.name}.{own}" if place.name else own)
            yield Weight(
                name,
                parameter.dtype,
                tuple(parameter.shape),
                adapter=place.adapter,
                module=place.name,
                kind=place.kind,
                pinned=is_pinned(name, pinned),
                quantization=_quantization(place, own),
            )


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers in the order of `weights_of`."""
    seen: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            seen.setdefault(id(tensor), tensor)
    return list(seen.values())


def state_tensors(tensor: Any, layer: Any = None) -> Iterator[torch.Tensor]:
    """Yield the tensors of a bitsandbytes quantization state.

    `layer` is the module of the weight `tensor`: an int8 layer moves codes and row scales to its own state in
    its first forward.
    """
    state = getattr(tensor, "quant_state", None)
    beside = layer.state if layer is not None and kind_of(layer) == "linear8bit" else None
    for holder, names in (
        (state, ("absmax", "code", "offset")),
        (getattr(state, "state2", None), ("absmax", "code", "offset")),
        (tensor, ("CB", "SCB")),
        (beside, ("CB", "SCB")),
    ):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, torch.Tensor):
                yield value


def memory_kind(weight: Weight) -> MemoryKind:
    """Return the memory kind of a weight."""
    constants = weight.module_class == QuantizedStack.__name__
    return "buffers" if weight.buffer and not constants else "adapters" if weight.adapter else "weights"


def _tied(weight: Weight, name: str) -> Weight:
    return replace(weight, tied=(*weight.tied, name))


def _pinned_patterns(model: Any) -> tuple[str, ...]:
    """Return the patterns of transformers' `_keep_in_fp32_modules` and its strict form, of all modules."""
    patterns: set[str] = set()
    for module in model.modules():
        for read in (pinned, pinned_strictly):
            patterns |= set(read(module) or ())
    return tuple(sorted(patterns))


def _quantization(place: Place, own: str) -> Quantization | None:
    stack = held_stack(place.module)
    if stack is not None:
        constants, codes = stack.factors()[0].dtype, place.module.get_parameter(own).dtype
        return Quantization(stack.storage, stack.dtype, stack.dtype, True, constants, codes, codes)
    if own != "weight" or place.kind not in ("linear4bit", "linear8bit"):
        return None
    layer: Any = place.module
    if place.kind == "linear8bit":
        scales = row_scales(layer) if hasattr(layer.weight, "SCB") else None
        absmax = None if scales is None else scales.dtype
        return Quantization("int8", None, None, scales is not None, absmax, layer.weight.dtype, torch.int8)
    state = quantization_state(layer)
    return Quantization(
        format=str(getattr(state, "quant_type", None) or getattr(layer.weight, "quant_type", "4-bit")),
        compute=layer.compute_dtype if layer.compute_type_is_set else None,
        state=getattr(state, "dtype", None),
        present=state is not None,
        absmax=_absmax(state),
        packed=layer.weight.dtype,
        storage=getattr(layer.weight, "quant_storage", None),
        repacking=repacking(layer),
    )


def _absmax(state: Any) -> torch.dtype | None:
    if state is None:
        return None
    holder = state.state2 if state.nested else state
    dtype: torch.dtype = holder.absmax.dtype
    return dtype


def _has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values can be read: subclasses with their own dispatch may not support it."""
    plain: Any = torch.Tensor.__torch_dispatch__
    own = type(tensor).__torch_dispatch__ is not plain
    return not (own or tensor.is_meta or isinstance(tensor, FakeTensor))


def _magnitudes(tensor: torch.Tensor, buffer: bool) -> tuple[float | None, float | None]:
    """Return the largest absolute value and median magnitude of float weights with available values.

    All values are checked for non-finite ones. For a quantized weight only the finiteness of its constants is
    known.
    """
    if buffer or not _has_values(tensor) or not tensor.numel():
        return None, None
    if getattr(tensor, "quant_state", None) is not None or getattr(tensor, "SCB", None) is not None:
        return (None if all_finite([tensor]) else math.nan), None
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return None, None
    least, most = (float(each) for each in torch.aminmax(tensor.detach()))  # one pass without allocations
    largest = math.nan if math.isnan(least) or math.isnan(most) else max(abs(least), abs(most))
    if not tensor.requires_grad or tensor.numel() > _LOOKED_AT:
        return largest, None
    values = tensor.detach().abs()
    nonzero = values[values > 0]
    return largest, float(nonzero.float().median()) if nonzero.numel() else None


def _exact_in(tensor: torch.Tensor, buffer: bool) -> torch.dtype | None:
    if buffer or tensor.dtype != torch.float32 or not _has_values(tensor):
        return None
    if not 0 < tensor.numel() <= _LOOKED_AT:
        return None
    values = tensor.detach()
    halves = (torch.bfloat16, torch.float16)
    return next((half for half in halves if torch.equal(values.to(half).float(), values)), None)
