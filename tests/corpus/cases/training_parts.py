"""Costs that several scenarios of trainable parameters share: each is measured on a copy of the set-up."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from tests.corpus.scenario import Broken
from tests.models import small_model, tiny_batch
from tests.reality import real_step

UNSCALE_HALF = r"Attempting to unscale FP16 gradients"


def loaded(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """`small_model` as `from_pretrained(dtype=…)` leaves it: float32 buffers, rotary frequencies among them, stay."""
    model = small_model(name, dtype)
    whole = dict(small_model(name).named_buffers())
    for buffer_name, buffer in model.named_buffers():
        if buffer.dtype != whole[buffer_name].dtype:
            holder, _, own = buffer_name.rpartition(".")
            model.get_submodule(holder)._buffers[own] = whole[buffer_name]
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def after_training(model: nn.Module, size: float = 0.02) -> nn.Module:
    """Adapters as some steps leave them: `lora_B` is no longer zero, so that `lora_A` has a gradient."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(size * torch.randn(parameter.shape))
    return model


def stepped(broken: Broken) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A copy of the model after one real step, and its trainable values before; the model itself is untouched."""
    model = copy.deepcopy(broken.model)
    before = {name: parameter.detach().clone() for name, parameter in trained(model).items()}
    outcome = real_step(
        model, broken.inputs, broken.autocast, False, broken.optimizer, broken.learning_rate, broken.phases
    )
    assert outcome.error is None, outcome.error
    return model, before


def scaled_bfloat16(broken: Broken) -> str | None:
    """bfloat16 gradients that a GradScaler is handed: CUDA's unscale kernel has no code for them."""
    if not broken.scaler:
        return None
    model, _ = stepped(broken)
    count = sum(parameter.grad.dtype == torch.bfloat16 for parameter in _with_gradient(model))
    return f"the GradScaler is handed {count} bfloat16 gradients" if count else None


def unmoved(part: str = "", least: float = 0.05) -> Callable[[Broken], str | None]:
    """The share of trainable values with a gradient that one step leaves where they were."""

    def cost(broken: Broken) -> str | None:
        model, before = stepped(broken)
        still = count = 0
        for name, parameter in trained(model).items():
            if part in name and parameter.grad is not None:
                moving = parameter.grad != 0
                still += int((moving & (parameter == before[name])).sum())
                count += int(moving.sum())
        assert count, f"no trainable value of {part!r} had a gradient"
        return (
            f"{still / count:.0%} of the values with a gradient did not move"
            if still > least * count
            else None
        )

    return cost


def lost_gradients(broken: Broken) -> str | None:
    """Gradients of a float16 run without loss scaling that are zero and are not with it."""
    if broken.scaler:
        return None
    zeros = {}
    for scale in (1.0, 4096.0):
        model = copy.deepcopy(broken.model)
        inputs = broken.inputs

        def loss(module: nn.Module, scale: float = scale, inputs: object = inputs) -> torch.Tensor:
            value = inputs(module) if callable(inputs) else module(**inputs).loss  # type: ignore[arg-type]
            return value * scale

        outcome = real_step(model, loss, broken.autocast, phases=("forward", "backward"))
        assert outcome.error is None, outcome.error
        zeros[scale] = sum(int((parameter.grad == 0).sum()) for parameter in _with_gradient(model))
    lost = zeros[1.0] - zeros[4096.0]
    return f"{lost} gradients are flushed to zero" if lost > 0 else None


def nan_after(broken: Broken, steps: int = 2) -> str | None:
    """Whether trainable values are NaN after a few real steps."""
    model = copy.deepcopy(broken.model)
    for _ in range(steps):
        real_step(model, broken.inputs, broken.autocast, False, broken.optimizer, broken.learning_rate)
    bad = [name for name, parameter in trained(model).items() if not parameter.isfinite().all()]
    return f"{len(bad)} trainable parameters are not finite after {steps} steps" if bad else None


def full(name: str, dtype: torch.dtype, learning_rate: float, **settings: object) -> Broken:
    """Every parameter of a tiny model trained in `dtype`."""
    return Broken(loaded(name, dtype), tiny_batch(name), learning_rate=learning_rate, **settings)  # type: ignore[arg-type]


def _with_gradient(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]
