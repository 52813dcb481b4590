"""PEFT adapters and quantized layers that do not fit their model."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from isotype.core.dtypes import dtype_name
from isotype.model.walk import Place
from tests.faults.setup import Fault, Setup, cast, head, linears, middle

_TARGETS = 4  # layers adapted
# PEFT refuses these in mixtures of experts (fused there) and in Mamba; adapters in a tower train nothing without images.
_NOT_ADAPTED = ("gate_proj", "up_proj", "down_proj", "out_proj")
_TOWERS = re.compile("vision|visual|tower|audio|image|video")


def _add_lora(setup: Setup, wide_adapters: bool, **config: Any) -> list[Any]:
    """LoRA on some layers in the middle; returns PEFT's layers."""
    import peft
    from peft.tuners.lora import LoraLayer

    found = _adaptable(setup)
    start = max(0, len(found) // 2 - _TARGETS // 2)
    targets = [place.name for place in found[start : start + _TARGETS]]
    if not targets:
        return []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        setup.model = peft.get_peft_model(
            setup.model,
            peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **config),
            autocast_adapter_dtype=wide_adapters,
        )
    return [module for module in setup.model.modules() if isinstance(module, LoraLayer)]


def _adaptable(setup: Setup) -> list[Place]:
    return [
        place
        for place in linears(setup.model)
        if place.name.rpartition(".")[2] not in _NOT_ADAPTED and not _TOWERS.search(place.name)
    ]


def _adapters_to(layers: list[Any], dtype: torch.dtype) -> None:
    for layer in layers:
        for parameter in (*layer.lora_A.parameters(), *layer.lora_B.parameters()):
            cast(parameter, dtype)


def lora_float32(setup: Setup) -> str | None:
    """PEFT's default: float32 adapters on a 16-bit model, inputs cast."""
    return "float32 adapters, inputs cast" if _add_lora(setup, True) else None


def lora_uncast(setup: Setup) -> str | None:
    """Adapters of another dtype whose inputs are not cast."""
    layers = _add_lora(setup, False)
    _adapters_to(layers, setup.wide)
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    return f"{dtype_name(setup.wide)} adapters, inputs not cast" if layers else None


def lora_b_wide(setup: Setup) -> str | None:
    """The second of an adapter's two matrices in another dtype than the first."""
    layers = _add_lora(setup, False)
    for layer in layers:
        for parameter in layer.lora_B.parameters():
            cast(parameter, setup.wide)
    return f"lora_B in {dtype_name(setup.wide)}" if layers else None


def lora_base_wide(setup: Setup) -> str | None:
    """The layers under the adapters in another dtype than the model."""
    layers = _add_lora(setup, False)
    for layer in layers:
        cast(layer.get_base_layer().weight, setup.wide)
    return f"adapted layers in {dtype_name(setup.wide)}" if layers else None


def dora_magnitude_other(setup: Setup) -> str | None:
    """DoRA with magnitudes in the other 16-bit dtype."""
    layers = _add_lora(setup, True, use_dora=True)
    for layer in layers:
        for vector in layer.lora_magnitude_vector.values():
            cast(vector.weight, setup.other)
    return f"DoRA magnitudes in {dtype_name(setup.other)}" if layers else None


def saved_copy_wide(setup: Setup) -> str | None:
    """The trained copy of the head in another dtype than what reaches it."""
    last = head(setup.model)
    name = next((name for name, module in setup.model.named_modules() if module is last), None)
    if name is None or not _add_lora(setup, False, modules_to_save=[name]):
        return None
    copies = [parameter for key, parameter in setup.model.named_parameters() if ".modules_to_save." in key]
    for parameter in copies:
        cast(parameter, setup.wide)
    return f"the copy of {name} in {dtype_name(setup.wide)}" if copies else None


def scaler_narrow_adapters(setup: Setup) -> str | None:
    """A GradScaler over adapters in the model's own dtype."""
    setup.scaler = True
    return "a GradScaler, adapters in the model's dtype" if _add_lora(setup, False) else None


def _linear_4bit(layer: Any, compute: torch.dtype | None) -> Any:
    import bitsandbytes

    packed = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=compute, quant_type="nf4"
    )
    packed.load_state_dict(layer.state_dict())
    return packed.to(layer.weight.dtype).to("cpu").requires_grad_(False)


def _linear_8bit(layer: Any) -> Any:
    import bitsandbytes

    packed = bitsandbytes.nn.Linear8bitLt(
        layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False
    )
    packed.load_state_dict(layer.state_dict())
    return packed.to(layer.weight.dtype).to("cpu").requires_grad_(False)


def _quantize(setup: Setup, packed: Any, found: list[Place] | None = None) -> str | None:
    place = middle(linears(setup.model) if found is None else found)
    if place is None:
        return None
    layer = packed(place.module)
    setup.model.set_submodule(place.name, layer)
    return place.name


def nf4(setup: Setup) -> str | None:
    """A 4-bit layer that computes in the model's dtype: healthy."""
    name = _quantize(setup, lambda layer: _linear_4bit(layer, setup.dtype))
    return name and f"{name} in nf4, computing in {dtype_name(setup.dtype)}"


def nf4_compute_wide(setup: Setup) -> str | None:
    """A 4-bit layer that computes in another dtype: bitsandbytes casts, silently."""
    name = _quantize(setup, lambda layer: _linear_4bit(layer, setup.wide))
    return name and f"{name} in nf4, computing in {dtype_name(setup.wide)}"


def nf4_state_stale(setup: Setup) -> str | None:
    """A 4-bit layer whose quantization state still dequantizes to another dtype."""
    name = _quantize(setup, lambda layer: _linear_4bit(layer, setup.dtype))
    if name is not None:
        packed: Any = setup.model.get_submodule(name)
        packed.weight.quant_state.dtype = setup.wide
    return name and f"{name} in nf4, its state in {dtype_name(setup.wide)}"


def nf4_weight_raw(setup: Setup) -> str | None:
    """Packed 4-bit bytes where a weight is wanted."""
    place = middle(linears(setup.model))
    if place is None:
        return None
    packed = _linear_4bit(place.module, setup.dtype)
    place.module.weight = nn.Parameter(packed.weight.data, requires_grad=False)
    return f"{place.name} with packed bytes as its weight"


def nf4_lora(setup: Setup) -> str | None:
    """4-bit layers under float32 adapters, as QLoRA has it."""
    name = _quantize(setup, lambda layer: _linear_4bit(layer, setup.dtype), _adaptable(setup))
    if name is None:
        return None
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=[name], init_lora_weights=False)
        setup.model = peft.get_peft_model(setup.model, config)
    return f"{name} in nf4 under float32 adapters"


def int8(setup: Setup) -> str | None:
    """An int8 layer: healthy."""
    name = _quantize(setup, _linear_8bit)
    return name and f"{name} in int8"


FAULTS: tuple[Fault, ...] = tuple(
    Fault(inject.__name__.replace("_", "-"), inject)
    for inject in (
        lora_float32,
        lora_uncast,
        lora_b_wide,
        lora_base_wide,
        dora_magnitude_other,
        saved_copy_wide,
        scaler_narrow_adapters,
        nf4,
        nf4_compute_wide,
        nf4_state_stale,
        nf4_weight_raw,
        nf4_lora,
        int8,
    )
)
