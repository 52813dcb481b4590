"""Cheaper trainings of experts, tried if nothing fits with adapters on all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from isotype.checkpoint.weightless import skeleton
from isotype.model.recompute import CHECKPOINTING
from isotype.model.targets import choose_targets
from isotype.planning.request import PlanRequest
from isotype.precision.devices.profile import device_profile

_EIGHT_BITS = "adamw_bnb_8bit"
_SHORTER = (512, 256)
"""Row lengths in tokens, tried last."""


def lighter(request: PlanRequest, config: Any) -> Iterator[tuple[str, PlanRequest]]:
    """Yield what is given up and the request without it, the smallest loss first; only if experts have adapters."""
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
        experts, less = f"{experts}, optimizer states in 32 bits", _with_8_bits(less)
        yield experts, less
    yield from _least(experts, less)


def _least(given_up: str, request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Yield nf4 with 8-bit constants and recomputation, then shorter rows; nothing if a storage was requested."""
    step, command = request.step, request.command
    if not request.quantize or step.precision.quantization is not None or step.precision.storage is not None:
        return
    command = command.but(quantization="nf4", use_bnb_nested_quant=True)
    step = replace(step, precision=replace(step.precision, quantization="nf4", double_quant=True))
    if step.auto:
        step = replace(step, auto=False, checkpointing=CHECKPOINTING)
    given_up = f"{given_up}, 4-bit constants in 32 bits (--use_bnb_nested_quant)"
    yield given_up, replace(request, step=step, command=command)
    if request.length is not None:
        return
    for tokens in _SHORTER:
        shorter = command.but(max_length=tokens)
        yield (
            f"{given_up}, rows of more than {tokens} tokens",
            replace(request, step=step, command=shorter, length=tokens),
        )


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
    """Return the last names of the adapted linear layers that are not experts."""
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
    model = skeleton(config, torch.bfloat16)
    choose_targets(model, wanted)
    if not wanted.target_parameters:
        return []
    named = wanted.target_modules or ()
    if isinstance(named, str):
        head = model.get_output_embeddings()
        linear = ((name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear))
        named = {name for name, each in linear if each is not head}
    return sorted({name.rpartition(".")[2] for name in named})
