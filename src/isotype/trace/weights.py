"""Reads dtype, shape, kind of module, quantization and magnitude of each parameter and buffer of a model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from isotype.compat.torch import has_values, is_traceable_wrapper_subclass
from isotype.compat.transformers import pinned, pinned_strictly
from isotype.core.dtypes import HALVES
from isotype.core.names import unparametrized
from isotype.core.threads import SMALL, one_thread
from isotype.model.boundary import Boundary
from isotype.model.experts.stack import QuantizedStack, held_stack
from isotype.model.finite import all_finite
from isotype.model.quantized import is_repacked, quantization_state, repacking, row_scales
from isotype.model.read_weights import layers_read
from isotype.model.shard import gathering, is_sharded, local
from isotype.model.walk import Place, kind_of, places, repeats_of
from isotype.precision.policy import is_pinned
from isotype.records.memory import MemoryKind
from isotype.records.trace import Quantization, Weight
from isotype.trace.dtype_history import codes_set_at, emptied_at, set_at

# Larger tensors get no median and no digits. Norms, biases and adapters are far smaller.
_MOST_ELEMENTS = 1 << 24
_MISSPELT = ("require_grad", "require_grads", "requires_grads", "required_grad", "requires_gradient")
"""Misspellings of `requires_grad` in scripts."""


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """Return the records of all parameters and buffers of `model`, see `tensors_and_weights`."""
    return tuple(weight for _, weight in tensors_and_weights(model))


def tensors_and_weights(model: nn.Module) -> list[tuple[torch.Tensor, Weight]]:
    """Return each parameter and buffer of `model` once, with its record. `Weight.tied` lists the other names of a tensor."""
    pinned, gathered = _pinned_patterns(model), gathering(model)
    # Each tensor is kept alive, because another new tensor could get its id.
    rows: dict[int, tuple[torch.Tensor, Weight]] = {}
    repeats, readers = repeats_of(model), layers_read(model)
    set_on: dict[str, tuple[str, bool]] = {}
    for place in places(model):
        # `module.requires_grad = False` sets a plain attribute. `nn.Module` never reads it.
        if isinstance(value := vars(place.module).get("requires_grad"), bool):
            set_on[place.name] = f"{place.name or 'model'}.requires_grad", value
        elif (outer := set_on.get(place.name.rpartition(".")[0])) and place.name:
            set_on[place.name] = outer
        parameters = [(False, *named) for named in place.module.named_parameters(recurse=False)]
        buffers = [(True, *named) for named in place.module.named_buffers(recurse=False)]
        for buffer, name, tensor in (*parameters, *buffers):
            if id(tensor) in rows:
                _, known = rows[id(tensor)]
                rows[id(tensor)] = (
                    tensor,
                    replace(known, tied=(*known.tied, unparametrized(place.full_name(name)))),
                )
                continue
            # Values are read before the shape: a lazy layer's error about values names the fix.
            largest, median_magnitude = (None, None) if buffer else _magnitudes(tensor)
            misspelt = ((n, value) for n in _MISSPELT if isinstance(value := vars(tensor).get(n), bool))
            row = replace(
                _row(place, name, tensor, pinned, gathered),
                buffer=buffer,
                trainable=tensor.requires_grad,
                module_class=type(place.module).__name__,
                repeats=repeats[place.name],
                reader=readers.get(place.name.removesuffix(".base_layer"), "") if name == "weight" else "",
                largest=largest,
                median_magnitude=median_magnitude,
                exact_in=None if buffer else _exact_in(tensor),
                # Adapters that are added later do not get the attribute of the base model.
                set_at=set_at(place.module, name),
                codes_set_at=codes_set_at(place.module) if name == "weight" else "",
                emptied_at=emptied_at(place.module, name),
                set_on=None if buffer or place.adapter else next(misspelt, None) or set_on.get(place.name),
            )
            rows[id(tensor)] = tensor, row
    return list(rows.values())


def unread_weights(model: nn.Module) -> Iterator[Weight]:
    """Yield each parameter's record without reading values. Buffers and parameters of lazy layers are left out."""
    pinned, gathered = _pinned_patterns(model), gathering(model)
    seen: dict[int, torch.Tensor] = {}
    for place in places(model):
        for name, parameter in place.module.named_parameters(recurse=False):
            if id(parameter) not in seen and not isinstance(parameter, UninitializedParameter):
                seen[id(parameter)] = parameter
                yield _row(place, name, parameter, pinned, gathered)


def _row(
    place: Place, name: str, tensor: torch.Tensor, pinned: Sequence[str], gathered: Mapping[str, Any]
) -> Weight:
    """Return the record of a parameter or buffer; fields that need the tensor's values have their defaults."""
    full = unparametrized(place.full_name(name))
    unit, dtype = gathered.get(place.full_name(name), (None, None))
    return Weight(
        full,
        tensor.dtype,
        tuple(tensor.shape),
        adapter=place.adapter,
        module=place.name,
        kind=place.kind,
        pinned=is_pinned(full, pinned),
        quantization=_quantization(place, name),
        unit=unit,
        gathered=dtype,
    )


def state_tensors(tensor: Any, layer: Any = None) -> Iterator[torch.Tensor]:
    """Yield the tensors of a weight's bitsandbytes quantization state.

    `layer` is the module of the weight `tensor`. The first forward of an int8 layer moves the codes and row scales to
    `layer.state`.
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


def packed_bytes(tensor: Any) -> int | None:
    """Return the bytes of the tensors inside a weight of torchao or quanto; None for other tensors."""
    if is_sharded(tensor) or not is_traceable_wrapper_subclass(tensor):
        return None
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return sum(part.nbytes if (size := packed_bytes(part)) is None else size for part in parts)


def memory_kind(weight: Weight) -> MemoryKind:
    constants = weight.module_class == QuantizedStack.__name__
    return "buffers" if weight.buffer and not constants else "adapters" if weight.adapter else "weights"


def _pinned_patterns(model: Any) -> tuple[str, ...]:
    patterns: set[str] = set()
    for module in model.modules():
        patterns.update(pinned(module) or (), pinned_strictly(module) or ())
    return tuple(sorted(patterns))


def _quantization(place: Place, name: str) -> Quantization | None:
    stack = held_stack(place.module)
    if stack is not None:
        constants, codes = stack.factors()[0].dtype, place.module.get_parameter(name).dtype
        return Quantization(stack.storage, stack.dtype, stack.dtype, True, constants, codes, codes)
    if name != "weight" or place.kind not in ("linear4bit", "linear8bit"):
        return None
    layer: Any = place.module
    state: Any
    if place.kind == "linear8bit":
        scales = row_scales(layer) if hasattr(layer.weight, "SCB") else None
        absmax = None if scales is None else scales.dtype
        present, packed, bounded = scales is not None, layer.weight.dtype, isinstance(layer, Boundary)
        return Quantization("int8", None, None, present, absmax, packed, torch.int8, bounded=bounded)
    state = quantization_state(layer)
    absmax = None if state is None else (state.state2 if state.nested else state).absmax.dtype
    return Quantization(
        format=str(getattr(state, "quant_type", None) or getattr(layer.weight, "quant_type", "4-bit")),
        compute=layer.compute_dtype if layer.compute_type_is_set else None,
        state=getattr(state, "dtype", None),
        present=state is not None,
        absmax=absmax,
        packed=layer.weight.dtype,
        storage=getattr(layer.weight, "quant_storage", None),
        repacking=repacking(layer),
        repacked=is_repacked(state),
    )


def _magnitudes(tensor: torch.Tensor) -> tuple[float | None, float | None]:
    """Return the largest and the median absolute value of a float parameter, or (None, None) if its values are unknown.

    The largest value is NaN if the parameter (or a constant of its quantization) is not finite. Only trainable
    parameters of at most `_MOST_ELEMENTS` elements get a median.
    """
    values = local(tensor.detach())
    if not has_values(values) or not values.numel():
        return None, None
    if getattr(tensor, "quant_state", None) is not None or getattr(tensor, "SCB", None) is not None:
        return (None if all_finite([tensor]) else math.nan), None
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return None, None
    with one_thread(tensor.numel() <= SMALL):
        least, most = map(float, torch.aminmax(values))  # one pass without allocations
        largest = math.nan if math.isnan(least) or math.isnan(most) else max(abs(least), abs(most))
        if not tensor.requires_grad or values.numel() > _MOST_ELEMENTS:
            return largest, None
        nonzero = (values := values.abs())[values > 0]
        return largest, float(nonzero.float().median()) if nonzero.numel() else None


def _exact_in(tensor: torch.Tensor) -> torch.dtype | None:
    values = local(tensor.detach())
    if values.dtype != torch.float32 or not has_values(values) or not 0 < values.numel() <= _MOST_ELEMENTS:
        return None
    return next((half for half in HALVES if torch.equal(values.to(half).float(), values)), None)
