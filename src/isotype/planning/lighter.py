"""Trainings of experts that give something up, for a device on which nothing fits with adapters on all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from isotype.checkpoint.weightless import skeleton
from isotype.model.targets import choose_targets
from isotype.planning.request import PlanRequest
from isotype.precision.devices.profile import device_profile

_EIGHT_BITS = "adamw_bnb_8bit"


def lighter(request: PlanRequest, config: Any) -> Iterator[tuple[str, PlanRequest]]:
    """(what is given up, the request without it), the least first; none unless `all-linear` put adapters on experts."""
    names = _beside_experts(request, config)
    if not names:
        return
    on_gpu = all(device_profile(name).kind == "cuda" for name in request.devices)
    choosable = on_gpu and "optim" not in request.command.values
    experts, less = f"adapters on experts (they stay on {', '.join(names)})", _on(names, request)
    if choosable:
        yield "optimizer states in 32 bits (--optim adamw_bnb_8bit)", _with_8_bits(request)
    yield experts, less
    if choosable:
        yield f"{experts}, optimizer states in 32 bits", _with_8_bits(less)


def _with_8_bits(request: PlanRequest) -> PlanRequest:
    step = replace(request.step, optimizer=_EIGHT_BITS)
    return replace(request, step=step, command=request.command.but(optim=_EIGHT_BITS))


def _on(names: list[str], request: PlanRequest) -> PlanRequest:
    lora: Any = copy.deepcopy(request.step.lora)
    if isinstance(lora, Mapping):
        lora = {**lora, "target_modules": names}
    else:
        lora.target_modules = names
    step = replace(request.step, lora=lora)
    return replace(request, step=step, command=request.command.but(lora_target_modules=names))


def _beside_experts(request: PlanRequest, config: Any) -> list[str]:
    """Last names of the linear layers that have adapters beside experts."""
    import peft

    lora = request.step.lora
    targets = (
        lora.get("target_modules", "all-linear")
        if isinstance(lora, Mapping)
        else getattr(lora, "target_modules", None)
    )
    if targets != "all-linear" or "lora_target_modules" in request.command.values:
        return []
    wanted = peft.LoraConfig(target_modules="all-linear")
    choose_targets(skeleton(config, torch.bfloat16), wanted)
    if not wanted.target_parameters or isinstance(wanted.target_modules, str):
        return []
    return sorted({name.rpartition(".")[2] for name in wanted.target_modules or ()})
