"""The one checker of what a policy promises about a live model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from isotype.model.experts.stack import QuantizedStack, held_stack
from isotype.model.walk import is_router, places
from isotype.precision.policy import PrecisionPolicy, is_pinned


def assert_policy_holds(model: torch.nn.Module, policy: PrecisionPolicy) -> dict[str, int]:
    """Walk every parameter, quantization state and buffer of `model`; returns how many of each role were seen."""
    seen: dict[str, int] = {}
    for place in places(model):
        for name, parameter in place.module.named_parameters(recurse=False):
            full_name = f"{place.name}.{name}"
            if held_stack(place.module) is not None:
                seen["stack"] = seen.get("stack", 0) + 1
                continue
            role = _role(place.kind, name, full_name, parameter, place.adapter, policy)
            if role == "plain" and policy.routers and is_router(place.module):
                role = "router"
            assert parameter.dtype == _expected(role, policy), (full_name, role, parameter.dtype)
            seen[role] = seen.get(role, 0) + 1
        _assert_state(place, policy)
        for name, buffer in place.module.named_buffers(recurse=False):
            full_name = f"{place.name}.{name}"
            if "inv_freq" in name or is_pinned(full_name, policy.pinned):
                assert buffer.dtype == torch.float32, (full_name, buffer.dtype)
                seen["float32 buffer"] = seen.get("float32 buffer", 0) + 1
    return seen


def _role(
    kind: str, name: str, full_name: str, parameter: torch.Tensor, adapter: bool, policy: PrecisionPolicy
) -> str:
    if parameter.requires_grad or adapter:
        return "master"
    if kind in ("linear4bit", "linear8bit") and name == "weight":
        return kind
    if is_pinned(full_name, policy.pinned):
        return "pinned"
    return "norm of a float32 stream" if policy.wide_residual and kind == "norm" else "plain"


def _expected(role: str, policy: PrecisionPolicy) -> torch.dtype:
    return {
        "master": policy.master,
        "linear4bit": policy.quant_storage,
        "linear8bit": torch.int8,
        "pinned": torch.float32,
        "router": torch.float32,
        "norm of a float32 stream": torch.float32,
        "plain": policy.plain,
    }[role]


def _assert_state(place: Any, policy: PrecisionPolicy) -> None:
    layer = place.module
    if isinstance(layer, QuantizedStack):
        assert (policy.experts or policy.storage) == layer.storage, place.name
        assert layer.dtype == policy.compute, place.name
        assert all(each.dtype == torch.float32 for each in layer.factors()), place.name
    if place.kind == "linear4bit":
        state = layer.weight.quant_state
        assert policy.storage == state.quant_type, place.name
        assert state.nested == policy.double_quant, place.name
        assert (state.dtype, layer.compute_dtype, layer.compute_type_is_set) == (
            policy.compute,
            policy.compute,
            True,
        ), place.name
        constants = state.state2.absmax if state.nested else state.absmax
        assert constants.dtype == torch.float32, place.name
    if place.kind == "linear8bit":
        assert policy.storage == "int8", place.name
        assert layer.state.SCB.dtype == torch.float32, place.name


def autocast(policy: PrecisionPolicy) -> AbstractContextManager[Any]:
    """The autocast that the policy asks for, on the CPU."""
    return torch.autocast("cpu", policy.autocast) if policy.autocast else nullcontext()


def train(model: Any, policy: PrecisionPolicy, batch: Any, steps: int = 4, lr: float = 2e-2) -> list[float]:
    """Real training steps under the policy; the loss of each. Checks the masters' gradients and Adam's moments."""
    model.train()
    masters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(masters.values(), lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=policy.loss_scaling)
    losses = []
    for step in range(steps):
        with autocast(policy):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        for name, parameter in masters.items():
            assert parameter.grad is not None, name
            assert parameter.grad.dtype == policy.master, name
            if step == 2:  # B starts at zero, so nothing reaches A in the first step
                assert parameter.grad.any(), name
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    for parameter in masters.values():
        state = optimizer.state[parameter]
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {policy.master}
    return losses
