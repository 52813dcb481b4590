"""Adapters merged into their layers: once, in float32, rounded once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.adapter import (
    Adapter,
    fill,
    inject,
    load_base,
    quiet_peft,
)
from isotype.checkpoint.dequantize import dequantize
from isotype.checkpoint.merge_report import (
    WeightLoss,
    rounding_loss,
)
from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError, Problem, UsageError
from isotype.core.names import base_name
from isotype.model.walk import is_pinned
from isotype.precision.policy import PrecisionPolicy


def merged(
    adapter: Adapter, base: str, policy: PrecisionPolicy, target: torch.dtype, revision: str | None = None
) -> tuple[Any, tuple[WeightLoss, ...], list[str]]:
    """The base model with the adapter merged in, its weights in `target`."""
    dense = _dense_policy(policy)
    # An unquantized base is only added to, and the CPU is where that has room.
    here = policy if policy.quantized else replace(policy, device="cpu")
    model = load_base(adapter, base, here, revision=revision)
    dequantize(model, dense.plain)
    tied = _untie(model)
    peft_model = inject(model, adapter, dense)
    own = _own_trained(peft_model)
    fill(peft_model, adapter)
    pinned = dense.pinned
    weights = []
    for name, layer in list(_tuner_layers(peft_model)):
        weights += _merge_layer(base_name(name), layer, target, pinned)
    weights += _replaced(peft_model, own, target, pinned)
    with quiet_peft():
        model = peft_model.base_model.merge_and_unload(safe_merge=True)
    _round(model, target, pinned)
    model.config.dtype = target
    return model, tuple(sorted(weights, key=lambda weight: weight.name)), _tie_again(model) if tied else []


def _dense_policy(policy: PrecisionPolicy) -> PrecisionPolicy:
    """The policy of the dequantized base: float32 masters, so that the adapter is read as it is stored."""
    plain = torch.float32 if policy.storage == "int8" else policy.compute
    return replace(
        policy,
        storage=dtype_name(plain),
        compute=plain,
        master=torch.float32,
        device="cpu",
        double_quant=False,
        pinned=policy.pinned if plain != torch.float32 else (),
    )


def _untie(model: Any) -> bool:
    """Give the output embeddings a weight of their own, so that each can be merged; whether they were tied."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if last is None or first.weight is not last.weight:
        return False
    last.weight = nn.Parameter(first.weight.detach().clone(), requires_grad=first.weight.requires_grad)
    return True


def _tie_again(model: Any) -> list[str]:
    """Tie the embeddings where the merge left them equal; else say that they are two weights now."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    equal = torch.equal(first.weight, last.weight)
    model.config.tie_word_embeddings = equal
    model.config.get_text_config().tie_word_embeddings = equal
    if equal:
        last.weight = first.weight
        return []
    return [
        "the base ties input and output embeddings, and the adapter changes them differently: the merged model "
        "stores both (tie_word_embeddings is false)"
    ]


def _tuner_layers(peft_model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return ((n, module) for n, module in peft_model.named_modules() if isinstance(module, BaseTunerLayer))


def _merge_layer(name: str, layer: Any, target: torch.dtype, pinned: Sequence[str]) -> list[WeightLoss]:
    """Merge one layer in float32 by PEFT's own code and round it."""
    wrapped = layer.get_base_layer()
    before = {each: parameter.data for each, parameter in wrapped.named_parameters()}
    wrapped.to(torch.float32)
    try:
        layer.merge(safe_merge=True)
    except (NotImplementedError, ValueError) as error:
        raise UsageError(
            "this adapter cannot be merged",
            [Problem(f"{name}: {error}", "an adapter that PEFT can merge", "use it beside its base")],
        ) from error
    after = {each: parameter.data for each, parameter in wrapped.named_parameters()}
    losses = _losses({f"{name}.{n}": (before[n], merged) for n, merged in after.items()}, target, pinned)
    _round(wrapped, target, pinned, f"{name}.")
    return losses


def _own_trained(peft_model: Any) -> dict[str, torch.Tensor]:
    """Copies of the base's own parameters that the adapter's file replaces (`bias="all"`), by their names."""
    prefix = getattr(peft_model.base_model, "prefix", "lora_")
    return {
        name: parameter.detach().clone()
        for name, parameter in peft_model.named_parameters()
        if parameter.requires_grad and prefix not in name and "modules_to_save" not in name
    }


def _replaced(
    peft_model: Any, own: Mapping[str, torch.Tensor], target: torch.dtype, pinned: Sequence[str]
) -> list[WeightLoss]:
    """The weights that were trained whole: biases and `modules_to_save`."""
    from peft.utils import ModulesToSaveWrapper

    parameters = dict(peft_model.named_parameters())
    pairs = {
        base_name(name): (before, parameters[name].data) for name, before in own.items() if name in parameters
    }
    for name, module in peft_model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            after = dict(module.modules_to_save[module.active_adapter].named_parameters())
            for each, before in module.original_module.named_parameters():
                if each in after:
                    pairs[f"{base_name(name)}.{each}"] = (before.data, after[each].data)
    return _losses(pairs, target, pinned)


def _losses(
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], target: torch.dtype, pinned: Sequence[str]
) -> list[WeightLoss]:
    found = [
        rounding_loss(name, before, after, _wanted(name, target, pinned))
        for name, (before, after) in pairs.items()
    ]
    return [loss for loss in found if loss.entries]


def _wanted(name: str, target: torch.dtype, pinned: Sequence[str]) -> torch.dtype:
    return torch.float32 if is_pinned(name, pinned) else target


def _round(module: nn.Module, target: torch.dtype, pinned: Sequence[str], prefix: str = "") -> None:
    """Round every float parameter to the dtype it is stored in; none may leave that dtype's range."""
    outside = []
    for name, parameter in module.named_parameters():
        wanted = _wanted(prefix + name, target, pinned)
        if not parameter.is_floating_point() or parameter.dtype == wanted:
            continue
        rounded = parameter.data.to(wanted)
        if wanted == torch.float16 and not torch.isfinite(rounded).all():
            outside.append((prefix + name, float(parameter.data.float().abs().max())))
        parameter.data = rounded
    if outside:
        raise PrecisionError(
            f"{dtype_name(target)} cannot hold the merged weights",
            [
                Problem(
                    f"{name}: values up to {largest:.4g}", "at most 65504", "give --dtype bfloat16 or float32"
                )
                for name, largest in outside
            ],
        )
